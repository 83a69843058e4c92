// Package build plans how an image is made: of a Dockerfile, read by BuildKit's
// own parser, or of a list of steps. It is pure: text and configs in, actions and
// cache keys out. The server carries the actions out.
//
// A [Plan] has the stages that the target needs, in order. What a stage begins
// with (the config of its base) is known only when it begins, so that a [State]
// reads its instructions one by one and says what each is to do.
package build
