// Command generate writes api/openapi.json; "make proto" runs it.
package main

import (
	"fmt"
	"os"

	"github.com/cove-sandbox/cove/internal/openapi"
)

func main() {
	b, err := openapi.Document("api/cove/v1")
	if err == nil {
		err = os.WriteFile("api/openapi.json", b, 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "openapi:", err)
		os.Exit(1)
	}
}
