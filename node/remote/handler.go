package remote

import (
	"context"
	"errors"
	"io"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/pki"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	prefix = "/node/v1/"
	// timeoutHeader is what is left of the caller's deadline, in milliseconds: the
	// clocks of two machines differ.
	timeoutHeader = "Cove-Timeout"
)

// Handler serves a node to servers of its installation, over HTTP/2 on a
// connection made with pki's MutualTLS. Anybody else is refused.
func Handler(n node.Node) http.Handler { return &handler{methodsOf(n)} }

type handler struct{ methods map[string]method }

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	x := &exchange{r: r, in: newFrameReader(r.Body), out: newFrameWriter(w, http.NewResponseController(w).Flush)}
	w.Header().Set("Content-Type", "application/octet-stream")
	name, ok := strings.CutPrefix(r.URL.Path, prefix)
	m, known := h.methods[name]
	var err error
	switch {
	case r.ProtoMajor < 2:
		w.WriteHeader(http.StatusHTTPVersionNotSupported)
		return
	case !isServer(r):
		err = &sandbox.Error{Class: sandbox.Unauthenticated, Op: "node.remote", Msg: "only a server of this installation may call a node"}
	case !ok || !known || r.Method != http.MethodPost:
		err = &sandbox.Error{Class: sandbox.Unsupported, Op: "node.remote", Msg: "this node has no method '" + name + "'", Hint: "the two sides are of different versions"}
	}
	if err != nil {
		_ = x.out.over(err) // its caller has left if that fails
		return
	}
	strangers.Known(r.Context())
	ctx, cancel := x.context()
	defer cancel()
	x.serve(ctx, m)
}

// isServer looks at the certificate again: a handler may be put behind a listener
// that does not.
func isServer(r *http.Request) bool {
	if r.TLS == nil {
		return false
	}
	kind, _, err := pki.PeerOf(*r.TLS)
	return err == nil && kind == pki.Server
}

// exchange is one call on the node's side.
type exchange struct {
	r   *http.Request
	in  *frameReader
	out *frameWriter
}

func (x *exchange) context() (context.Context, context.CancelFunc) {
	if ms, err := strconv.ParseInt(x.r.Header.Get(timeoutHeader), 10, 64); err == nil && ms >= 0 {
		return context.WithTimeout(x.r.Context(), time.Duration(ms)*time.Millisecond)
	}
	return context.WithCancel(x.r.Context())
}

// serve calls the method and sends what comes of it. An error of sending means
// that the caller has left, which the context of the call says too.
func (x *exchange) serve(ctx context.Context, m method) {
	args, err := m.args(ctx, x)
	if err != nil {
		_ = x.out.over(err)
		return
	}
	results := m.call.Call(args)
	if m.streams {
		_ = x.out.over(x.stream(results[0]))
		return
	}
	last := len(results) - 1
	err, _ = results[last].Interface().(error)
	var values []any
	var conn node.Conn
	var content io.ReadCloser
	for _, r := range results[:last] {
		switch v := r.Interface().(type) {
		case node.Conn:
			conn = v
		case io.ReadCloser:
			content = v
		default:
			values = append(values, v)
		}
	}
	if err == nil {
		err = x.out.value(values...)
	}
	switch {
	case err == nil && conn != nil:
		x.join(conn)
		return
	case err == nil && content != nil:
		_, err = io.Copy(x.out, content)
		err = errors.Join(err, content.Close())
	}
	_ = x.out.over(err)
}

// stream sends the elements of an iterator, each at once.
func (x *exchange) stream(seq reflect.Value) (err error) {
	for v, e := range seq.Seq2() {
		if err, _ = e.Interface().(error); err != nil {
			return err
		}
		if err = x.out.value(v.Interface()); err == nil {
			err = x.out.send()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// join carries a connection until both halves of it are over, or one has failed,
// or the caller has left.
func (x *exchange) join(c node.Conn) {
	defer c.Close()
	defer context.AfterFunc(x.r.Context(), func() { breakOff(c) })()
	if x.out.send() != nil {
		return
	}
	came := make(chan struct{})
	go x.receive(c, came)
	buf := make([]byte, piece)
	for {
		n, err := c.Read(buf)
		if n > 0 {
			if _, werr := x.out.Write(buf[:n]); werr != nil || x.out.send() != nil {
				breakOff(c)
				return
			}
		}
		if err == io.EOF {
			if x.out.over(nil) == nil {
				<-came
			}
			return
		}
		if err != nil {
			_ = x.out.over(err)
			return
		}
	}
}

// receive gives c what comes, until its half is over, and then waits for the
// caller to close it. It ends with the handler.
func (x *exchange) receive(c node.Conn, came chan<- struct{}) {
	_, err := io.Copy(c, x.in)
	if err == nil {
		err = c.CloseWrite()
	}
	close(came)
	if err == nil {
		x.in.err = nil
		_, _, err = x.in.next()
	}
	if errors.Is(err, errClosed) {
		c.Close()
	} else {
		breakOff(c) // or the handler has returned, and c is closed
	}
}

// breakOff closes a connection so that its other end does not take it for an end
// in order.
func breakOff(c node.Conn) {
	if a, ok := c.(interface{ Abort(why error) error }); ok {
		_ = a.Abort(nil)
	}
	c.Close()
}

// method is one of the contract, by its shape: a context first, then values, at
// most one of them a reader or a writer; the results are values, at most one a
// connection or a reader, and an error; or one iterator.
type method struct {
	call    reflect.Value
	params  []reflect.Type // after the context
	streams bool
}

var (
	contextType = reflect.TypeFor[context.Context]()
	errorType   = reflect.TypeFor[error]()
	readerType  = reflect.TypeFor[io.Reader]()
	writerType  = reflect.TypeFor[io.Writer]()
	connType    = reflect.TypeFor[node.Conn]()
	contentType = reflect.TypeFor[io.ReadCloser]()
)

func methodsOf(n node.Node) map[string]method {
	all := map[string]method{}
	add := func(prefix string, contract reflect.Type, v any) {
		for i := range contract.NumMethod() {
			m := contract.Method(i)
			if shaped, ok := shapeOf(m.Type); ok {
				shaped.call = reflect.ValueOf(v).MethodByName(m.Name)
				all[prefix+m.Name] = shaped
			}
		}
	}
	add("", reflect.TypeFor[node.Node](), n)
	add("Volumes.", reflect.TypeFor[node.Volumes](), n.Volumes())
	add("Recordings.", reflect.TypeFor[node.Recordings](), n.Recordings())
	add("Images.", reflect.TypeFor[node.Images](), n.Images())
	return all
}

func shapeOf(t reflect.Type) (m method, ok bool) {
	if t.NumIn() == 0 || t.In(0) != contextType || t.NumOut() == 0 {
		return m, false
	}
	for i := 1; i < t.NumIn(); i++ {
		p := t.In(i)
		if !crosses(p) && p != readerType && p != writerType {
			return m, false
		}
		m.params = append(m.params, p)
	}
	last := t.Out(t.NumOut() - 1)
	if t.NumOut() == 1 && last.CanSeq2() && last.In(0).In(1) == errorType && crosses(last.In(0).In(0)) {
		m.streams = true
		return m, true
	}
	for i := range t.NumOut() - 1 {
		if r := t.Out(i); !crosses(r) && r != connType && r != contentType {
			return m, false
		}
	}
	return m, last == errorType
}

// crosses says whether a type is plain values.
func crosses(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Interface, reflect.Func, reflect.Chan, reflect.UnsafePointer, reflect.Pointer:
		return false
	}
	return true
}

// args reads the arguments.
func (m method) args(ctx context.Context, x *exchange) ([]reflect.Value, error) {
	in := []reflect.Value{reflect.ValueOf(ctx)}
	var ptrs []any
	for _, t := range m.params {
		switch t {
		case readerType:
			in = append(in, reflect.ValueOf(x.in))
		case writerType:
			in = append(in, reflect.ValueOf(x.out))
		default:
			p := reflect.New(t)
			ptrs, in = append(ptrs, p.Interface()), append(in, p.Elem())
		}
	}
	return in, x.in.value(ptrs...)
}
