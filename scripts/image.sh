#!/usr/bin/env bash
# Builds deploy/Dockerfile from what "make install" put into a directory, with
# whichever builder works here.
#   image.sh CONTEXT TAG
set -euo pipefail
context=$1 tag=$2

if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
  builder=(docker build)
elif command -v podman >/dev/null; then
  builder=(podman build)
elif command -v buildah >/dev/null; then
  builder=(buildah build)
else
  echo "cove: no docker with a running daemon, podman or buildah here; the context is complete in $context:" >&2
  echo "      docker build -f deploy/Dockerfile -t $tag $context" >&2
  exit 1
fi
"${builder[@]}" -f deploy/Dockerfile -t "$tag" "$context"
echo "built $tag; docs/server.md says how to run it"
