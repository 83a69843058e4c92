// Command portserver is the small server that tests and the benchmark put into a
// sandbox to reach it through the gateway.
package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"

	"github.com/coder/websocket"
)

func main() {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "hello\n") })
	mux.HandleFunc("/sum", func(w http.ResponseWriter, r *http.Request) { // of the body
		h := sha256.New()
		n, err := io.Copy(h, r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		fmt.Fprintf(w, "%d %x\n", n, h.Sum(nil))
	})
	mux.HandleFunc("/zeros", func(w http.ResponseWriter, r *http.Request) { // n of them
		n, _ := strconv.ParseInt(r.URL.Query().Get("n"), 10, 64)
		buf := make([]byte, 64<<10)
		for n > 0 {
			m, err := w.Write(buf[:min(n, int64(len(buf)))])
			if err != nil {
				return
			}
			n -= int64(m)
		}
	})
	mux.HandleFunc("/ws", func(w http.ResponseWriter, r *http.Request) { // echo
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			typ, b, err := c.Read(r.Context())
			if err != nil || c.Write(r.Context(), typ, b) != nil {
				return
			}
		}
	})
	log.Fatal(http.ListenAndServe("127.0.0.1:"+os.Args[1], mux))
}
