// Command portserver is the small server that tests and the benchmark put into a
// sandbox to reach it from outside.
//
//	portserver PORT [ECHO]        HTTP on PORT, and lines that come back on ECHO
package main

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"io"
	"log"
	"net"
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
	if len(os.Args) > 2 {
		ln, err := net.Listen("tcp", "127.0.0.1:"+os.Args[2])
		if err != nil {
			log.Fatal(err)
		}
		go echo(ln)
	}
	log.Fatal(http.ListenAndServe("127.0.0.1:"+os.Args[1], mux))
}

// echo answers every line with the number of it on its connection and itself:
// who is asked for the third time knows of the first two.
func echo(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go func() {
			defer c.Close()
			in := bufio.NewReader(c)
			for n := 1; ; n++ {
				line, err := in.ReadString('\n')
				if err != nil {
					return
				}
				if _, err := fmt.Fprintf(c, "%d %s", n, line); err != nil {
					return
				}
			}
		}()
	}
}
