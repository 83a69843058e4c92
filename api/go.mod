module github.com/cove-sandbox/cove/api

go 1.26

require (
	connectrpc.com/connect v1.21.0
	google.golang.org/protobuf v1.36.11
)
