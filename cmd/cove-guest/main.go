// Command cove-guest is what runs inside a kernel: "agent" as PID 1 of the
// root container, "init" as PID 1 of the user's container, and "bulk JSON" for
// one large transfer.
package main

func main() {}
