// Package grade knows what a sealed grading believes: which of a sandbox's files
// a grader is given ([Scan], [Write]), what in them a reader of the verdict
// should know of (findings), and how a report becomes a reward ([Pytest],
// [JUnit], [PytestJSON], [Reward]). It is pure but for the tars it reads: who
// runs graders is package server.
//
// Everything it reads is hostile: the tar is the agent's file system, a report
// may have been written by the agent's code. docs/grading.md has the reasons.
package grade
