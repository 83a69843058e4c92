// Command portload drives a port of a sandbox through the gateway and prints what
// it saw as one line of JSON. URLs carry their token ("cove url").
//
//	portload -for 10s -clients 16 URL
//	portload -websockets 2000 URL        opens them, asks each once, holds them until stdin ends
//	portload -lines HOST:PORT            lines to an echo and back, as a database's clients ask
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/coder/websocket"
)

func main() {
	length := flag.Duration("for", 10*time.Second, "how long")
	clients := flag.Int("clients", 16, "at once")
	sockets := flag.Int("websockets", 0, "instead: hold so many")
	lines := flag.String("lines", "", "instead: ask the echo at this address")
	slow := flag.Int("slow", 0, "beside it, clients of /zeros that do not read")
	flag.Parse()
	if *lines != "" {
		out, err := ask(*lines, *clients, *length)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		_ = json.NewEncoder(os.Stdout).Encode(out)
		return
	}
	u, err := url.Parse(flag.Arg(0))
	if err != nil || u.Host == "" {
		fmt.Fprintln(os.Stderr, "portload [flags] URL")
		os.Exit(2)
	}
	token := u.Query().Get("cove_token")
	u.RawQuery = ""
	l := &load{base: u, token: token, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: *clients, MaxIdleConns: 0}}}
	var out any
	if *sockets > 0 {
		out, err = l.hold(*sockets)
	} else {
		out, err = l.requests(*clients, *slow, *length)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(out)
}

type load struct {
	base   *url.URL
	token  string
	client *http.Client
}

func (l *load) get(ctx context.Context, path string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, l.base.JoinPath(path).String(), nil)
	if err != nil {
		return nil, err
	}
	r.Header.Set("X-Cove-Token", l.token)
	return l.client.Do(r)
}

type report struct {
	Requests int     `json:"requests"`
	Errors   int     `json:"errors"`
	PerSec   float64 `json:"per_second"`
	P50      float64 `json:"p50_ms"`
	P99      float64 `json:"p99_ms"`
	Max      float64 `json:"max_ms"`
}

func (l *load) requests(clients, slow int, length time.Duration) (report, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for range slow {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, l.base.JoinPath("zeros").String()+"?n=1000000000", nil)
		if err != nil {
			return report{}, err
		}
		r.Header.Set("X-Cove-Token", l.token)
		res, err := l.client.Do(r)
		if err != nil {
			return report{}, err
		}
		defer res.Body.Close() // never read
	}
	return measure(clients, length, func() (func() error, error) {
		return func() error {
			res, err := l.get(ctx, "/")
			if err != nil {
				return err
			}
			defer res.Body.Close()
			if res.StatusCode != http.StatusOK {
				return fmt.Errorf("status %d", res.StatusCode)
			}
			_, err = io.Copy(io.Discard, res.Body)
			return err
		}, nil
	})
}

// ask has every client send a line on a connection of its own, and the next when
// the answer has come.
func ask(addr string, clients int, length time.Duration) (report, error) {
	return measure(clients, length, func() (func() error, error) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return nil, err
		}
		in := bufio.NewReader(c)
		line := []byte("select balance from accounts where id = 4711 and not frozen\n")
		return func() error {
			if _, err := c.Write(line); err != nil {
				return err
			}
			_, err := in.ReadSlice('\n')
			return err
		}, nil
	})
}

// measure has every client do one thing after another for so long.
func measure(clients int, length time.Duration, client func() (once func() error, err error)) (report, error) {
	var mu sync.Mutex
	var took []time.Duration
	errs := 0
	once := make([]func() error, clients)
	for i := range once {
		var err error
		if once[i], err = client(); err != nil {
			return report{}, err
		}
	}
	began := time.Now()
	var wg sync.WaitGroup
	for _, once := range once {
		wg.Go(func() {
			var mine []time.Duration
			bad := 0
			for time.Since(began) < length {
				at := time.Now()
				if err := once(); err != nil {
					bad++
				} else {
					mine = append(mine, time.Since(at))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			took, errs = append(took, mine...), errs+bad
		})
	}
	wg.Wait()
	all := time.Since(began)
	if len(took) == 0 {
		return report{}, fmt.Errorf("no request of %d succeeded", errs)
	}
	slices.Sort(took)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return report{Requests: len(took), Errors: errs, PerSec: float64(len(took)) / all.Seconds(),
		P50: ms(took[len(took)/2]), P99: ms(took[len(took)*99/100]), Max: ms(took[len(took)-1])}, nil
}

type held struct {
	Open   int     `json:"open"`
	OpenMS float64 `json:"open_ms"` // all of them, 32 at a time
	AskMS  float64 `json:"ask_ms"`  // one message to each and back
}

// hold opens n WebSockets, says so on a line, and holds them until stdin ends;
// then each must still answer.
func (l *load) hold(n int) (held, error) {
	ctx := context.Background()
	conns := make([]*websocket.Conn, n)
	var mu sync.Mutex
	var first error
	began := time.Now()
	each := func(f func(i int) error) {
		var wg sync.WaitGroup
		next := make(chan int)
		for range 32 {
			wg.Go(func() {
				for i := range next {
					if err := f(i); err != nil {
						mu.Lock()
						if first == nil {
							first = fmt.Errorf("WebSocket %d: %w", i, err)
						}
						mu.Unlock()
					}
				}
			})
		}
		for i := range n {
			next <- i
		}
		close(next)
		wg.Wait()
	}
	each(func(i int) (err error) {
		conns[i], _, err = websocket.Dial(ctx, l.base.JoinPath("ws").String(), &websocket.DialOptions{HTTPClient: l.client, HTTPHeader: http.Header{"X-Cove-Token": {l.token}}})
		return err
	})
	out := held{Open: n, OpenMS: float64(time.Since(began).Milliseconds())}
	if first != nil {
		return out, first
	}
	fmt.Println("open")
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	began = time.Now()
	each(func(i int) error {
		msg := fmt.Sprint(i)
		if err := conns[i].Write(ctx, websocket.MessageText, []byte(msg)); err != nil {
			return err
		}
		_, got, err := conns[i].Read(ctx)
		if err == nil && string(got) != msg {
			err = fmt.Errorf("%q came back", got)
		}
		return err
	})
	out.AskMS = float64(time.Since(began).Milliseconds())
	for _, c := range conns {
		_ = c.CloseNow()
	}
	return out, first
}
