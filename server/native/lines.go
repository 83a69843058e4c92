package native

import (
	"errors"
	"io"
	"net/http"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// jsonLines answers with one JSON value a line. Used by one goroutine.
type jsonLines struct {
	w        http.ResponseWriter
	r        *http.Request
	together bool // they need not be sent one by one
	begun    bool
}

func (l *jsonLines) write(m proto.Message) {
	b, err := protojson.Marshal(m)
	if err != nil {
		panic(err) // a message of our own
	}
	l.line(b)
}

// begin says that all that follows are lines.
func (l *jsonLines) begin() {
	if !l.begun {
		l.begun = true
		l.w.Header().Set("Content-Type", "application/x-ndjson")
	}
}

func (l *jsonLines) line(b []byte) {
	l.begin()
	_, _ = l.w.Write(append(b, '\n')) // an error means that the client left
	if f, ok := l.w.(http.Flusher); ok && !l.together {
		f.Flush()
	}
}

// fail is an error of the whole answer while that can be told, and then its last
// line.
func (l *jsonLines) fail(err error) error {
	if err == nil || !l.begun {
		return err
	}
	l.line(wire.ErrorJSON(l.r, err))
	return nil
}

// readMessage reads a request's body as a message of the protos.
func readMessage(w http.ResponseWriter, r *http.Request, into proto.Message) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxMessage))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return &sandbox.Error{Class: sandbox.TooLarge, Msg: "the message is larger than " + sandbox.FormatSize(maxMessage)}
	case err != nil:
		return sandbox.Errorf(sandbox.Canceled, "", "reading the body: %w", err)
	}
	if err := (strictJSON{}).Unmarshal(body, into); err != nil {
		return &sandbox.Error{Class: sandbox.Invalid, Msg: "the body", Err: err}
	}
	return nil
}
