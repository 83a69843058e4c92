// Package recording records the HTTP exchanges of a sandbox and replays them. A
// [Recorder] and a [Player] stand in the way of every request as an
// http.RoundTripper: the one lets it pass and writes down what was said, the
// other answers out of what was written. Which recorded exchange answers a
// request is a pure function (match.go).
//
// # The format
//
// A recording is a file that is only ever appended to: 16 bytes of preamble
// ("COVETAPE", the version 1, a byte of flags, six of zero), then frames.
//
//	length   uint32  of the payload
//	kind     uint8   one of those below; with 0x80 the payload is compressed (zstd)
//	exchange uint32  which one it belongs to, from 1 in the order requests came; 0 = the recording's own
//	payload
//	check    uint32  CRC-32C of all before
//
// Numbers are little-endian. With flag 1 every payload is sealed, bound to its
// place in this very recording, with a key of whoever keeps it; an exported recording never is.
//
//	H  first of all: what is recorded (JSON, [Header])
//	Q  a request without its body (JSON); q  a part of the body, at most 64 KiB
//	A  the answer without its body; a  a part of the body
//	E  the end of an exchange: lengths, hash of the request's body, trailers, how it failed
//	N  a name that was looked up in vain, as it is
//	F  the end of the recording
//
// Frames of several exchanges are mixed, those of one are in order. An exchange
// without E is not complete and is not replayed. So a recording is readable up to its
// last whole frame, whenever its writer was killed. Strings in JSON that came
// from outside are bytes read as ISO 8859-1: none is lost.
package recording

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	magic       = "COVETAPE"
	version     = 1
	preambleLen = 16
	flagSealed  = 1

	frameHead = 9
	frameTail = 4

	chunk = 64 << 10 // of a body in one frame
	// maxPayload holds a head: net/http takes 256 KiB of headers, which JSON can
	// make six times as long.
	maxPayload = 2 << 20
	// Bounds of what an index may hold in memory, for recordings that others wrote:
	// 4 Mi frames are 256 GiB of full chunks.
	maxFrames    = 4 << 20
	maxExchanges = 1 << 20
	maxHeads     = 256 << 20
	maxUnfound   = 4096 // names; a tunnel in DNS would be as many as it has bytes
	maxName      = 255
)

type kind byte

const (
	kindHeader       kind = 'H'
	kindRequest      kind = 'Q'
	kindRequestBody  kind = 'q'
	kindAnswer       kind = 'A'
	kindAnswerBody   kind = 'a'
	kindEnd          kind = 'E'
	kindFinish       kind = 'F'
	kindUnfound      kind = 'N'
	compressed       kind = 0x80
	worthCompressing      = 256 // bytes; less does not get smaller
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// Sealer encrypts the payloads of one recording. place is authenticated with them.
type Sealer interface {
	Seal(plain, place []byte) []byte
	Open(sealed, place []byte) ([]byte, error)
	Overhead() int
}

// Header is what a recording says of itself.
type Header struct {
	ID       string    `json:"id,omitempty"`
	Sandbox  string    `json:"sandbox,omitempty"`
	Created  time.Time `json:"created"`
	Imported time.Time `json:"imported,omitzero"`

	// What it is called and whose it is, on recordings from before the store kept
	// that. Nothing writes them any more.
	Name   string `json:"name,omitempty"`
	Tenant string `json:"tenant,omitempty"`
}

// finish ends a recording.
type finish struct {
	At          time.Time `json:"at"`
	Interrupted bool      `json:"interrupted,omitempty"` // nobody ended it: it was found open
	Dropped     int64     `json:"dropped,omitempty"`
}

// requestHead is a request without its body.
type requestHead struct {
	At     time.Time `json:"at"`
	Method text      `json:"method"`
	URL    text      `json:"url"` // with the host that was asked for, and the port if it is not the scheme's
	Proto  string    `json:"proto"`
	Header header    `json:"header,omitempty"`
}

type answerHead struct {
	At      time.Time `json:"at"`
	Status  int       `json:"status"`
	Proto   string    `json:"proto"`
	Header  header    `json:"header,omitempty"`
	Length  int64     `json:"length"` // -1 = not announced
	Trailer []text    `json:"trailer,omitempty"`
}

// end of an exchange.
type end struct {
	At time.Time `json:"at"`
	// Request and Answer count the bytes of the bodies, as they were and not as
	// they are on the recording.
	Request int64  `json:"request"`
	Answer  int64  `json:"answer"`
	Hash    string `json:"hash"`              // SHA-256 of the request's body
	Partial bool   `json:"partial,omitempty"` // the request's body was not read to its end: it counts as any body
	Trailer header `json:"trailer,omitempty"`
	// Truncated: the answer is longer than what is on the recording. TruncatedRequest:
	// so is the request, which its hash can still tell.
	Truncated        bool `json:"truncated,omitempty"`
	TruncatedRequest bool `json:"truncated_request,omitempty"`
	// Cut: the answer broke off after what is on the recording, by either side.
	Cut     bool   `json:"cut,omitempty"`
	Upgrade bool   `json:"upgrade,omitempty"` // the connection became something else, which is not on the recording
	Failed  *fault `json:"failed,omitempty"`  // there was no answer
}

// fault is an error of the way out.
type fault struct {
	Class sandbox.Class `json:"class"`
	Msg   text          `json:"msg"`
}

// text is a string of any bytes.
type text string

func (t text) MarshalText() ([]byte, error) {
	out := make([]rune, len(t))
	for i := range len(t) {
		out[i] = rune(t[i])
	}
	return []byte(string(out)), nil
}

func (t *text) UnmarshalText(b []byte) error {
	out := make([]byte, 0, len(b))
	for _, r := range string(b) {
		if r > 0xff {
			return fmt.Errorf("a character above U+00FF")
		}
		out = append(out, byte(r))
	}
	*t = text(out)
	return nil
}

type header map[text][]text

func headerOf(h http.Header) header {
	out := make(header, len(h))
	for k, vs := range h {
		for _, v := range vs {
			out[text(k)] = append(out[text(k)], text(v))
		}
	}
	return out
}

func (h header) http() http.Header {
	out := make(http.Header, len(h))
	for k, vs := range h {
		for _, v := range vs {
			out[string(k)] = append(out[string(k)], string(v))
		}
	}
	return out
}

// The coders are shared: EncodeAll and DecodeAll keep no state.
var coders = sync.OnceValue(func() (c struct {
	in  *zstd.Encoder
	out *zstd.Decoder
}) {
	var err error
	if c.in, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1)); err != nil {
		panic(err) // of options that are constants
	}
	// The bound on memory is what keeps a small frame from becoming a large one.
	if c.out, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxPayload)); err != nil {
		panic(err)
	}
	return c
})

// place is what a sealed payload is bound to. The recording is in the key.
func place(k kind, exchange uint32, at int64) []byte {
	b := binary.LittleEndian.AppendUint64([]byte{byte(k)}, uint64(at))
	return binary.LittleEndian.AppendUint32(b, exchange)
}

// appendFrame appends a frame that will lie at an offset.
func appendFrame(dst []byte, s Sealer, at int64, k kind, exchange uint32, payload []byte) []byte {
	if len(payload) >= worthCompressing {
		if small := coders().in.EncodeAll(payload, nil); len(small) < len(payload)-len(payload)/16 {
			payload, k = small, k|compressed
		}
	}
	if s != nil {
		payload = s.Seal(payload, place(k, exchange, at))
	}
	start := len(dst)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(payload)))
	dst = append(dst, byte(k))
	dst = binary.LittleEndian.AppendUint32(dst, exchange)
	dst = append(dst, payload...)
	return binary.LittleEndian.AppendUint32(dst, crc32.Checksum(dst[start:], crcTable))
}

func preamble(sealed bool) []byte {
	b := make([]byte, preambleLen)
	copy(b, magic)
	b[8] = version
	if sealed {
		b[9] = flagSealed
	}
	return b
}

// frame is where one lies.
type frame struct {
	at       int64 // of its first byte
	size     int32 // of its payload
	kind     kind  // with compressed
	exchange uint32
}

func (f frame) next() int64 { return f.at + frameHead + int64(f.size) + frameTail }

// errTorn is a recording that ends within a frame, or in one that does not check.
var errTorn = fmt.Errorf("a frame is not whole")

// scanner reads frames in order.
type scanner struct {
	r      io.ReaderAt
	size   int64
	sealer Sealer
	at     int64
	buf    []byte

	unpacked func(n int) error // see read; nil = nobody counts
}

// openRecording checks the preamble.
func openRecording(r io.ReaderAt, size int64, s Sealer) (*scanner, error) {
	b := make([]byte, preambleLen)
	if _, err := r.ReadAt(b, 0); err != nil || string(b[:8]) != magic {
		return nil, corrupt("it does not begin as a recording does")
	}
	switch {
	case b[8] != version:
		return nil, (&sandbox.Error{Class: sandbox.Unsupported, Msg: fmt.Sprintf("a recording of version %d", b[8])}).WithHint("use the cove that wrote it, or a newer one")
	case b[9] == flagSealed && s == nil:
		return nil, (&sandbox.Error{Class: sandbox.Precondition, Msg: "the recording is encrypted, and its key is not here"}).WithHint("cove serve --state-keys names the keys")
	case b[9] != 0 && b[9] != flagSealed:
		return nil, corrupt("flags %#x", b[9])
	}
	if b[9] == 0 {
		s = nil
	}
	return &scanner{r: r, size: size, sealer: s, at: preambleLen}, nil
}

func corrupt(format string, args ...any) error {
	return &sandbox.Error{Class: sandbox.Corrupt, Msg: "recording: " + fmt.Sprintf(format, args...)}
}

// next finds the next frame without reading its payload: io.EOF at the end,
// errTorn where the file ends within it.
func (s *scanner) next() (f frame, err error) {
	if s.at == s.size {
		return f, io.EOF
	}
	var h [frameHead]byte
	if s.size-s.at < frameHead+frameTail {
		return f, errTorn
	}
	if _, err := s.r.ReadAt(h[:], s.at); err != nil {
		return f, errTorn
	}
	n := binary.LittleEndian.Uint32(h[:])
	f = frame{at: s.at, size: int32(n), kind: kind(h[4]), exchange: binary.LittleEndian.Uint32(h[5:])}
	if n > maxPayload || f.next() > s.size {
		return f, errTorn
	}
	s.at = f.next()
	return f, nil
}

// payload reads a frame, checked, opened and unpacked. The bytes are good until
// the next call.
func (s *scanner) payload(f frame) ([]byte, error) {
	p, err := s.unpack(f)
	if err == nil && s.unpacked != nil {
		err = s.unpacked(len(p))
	}
	return p, err
}

func (s *scanner) unpack(f frame) ([]byte, error) {
	n := frameHead + int(f.size) + frameTail
	if cap(s.buf) < n {
		s.buf = make([]byte, n)
	}
	b := s.buf[:n]
	if _, err := s.r.ReadAt(b, f.at); err != nil {
		return nil, err
	}
	if crc32.Checksum(b[:n-frameTail], crcTable) != binary.LittleEndian.Uint32(b[n-frameTail:]) {
		return nil, errTorn
	}
	p := b[frameHead : n-frameTail]
	if s.sealer != nil {
		var err error
		if p, err = s.sealer.Open(p, place(f.kind, f.exchange, f.at)); err != nil {
			if errors.Is(err, sandbox.ErrPrecondition) { // its key is not here
				return nil, err
			}
			return nil, corrupt("a frame does not open: %v", err)
		}
	}
	if f.kind&compressed == 0 {
		return p, nil
	}
	p, err := coders().out.DecodeAll(p, nil)
	if err != nil || len(p) > maxPayload {
		return nil, corrupt("a frame does not unpack: %v", err)
	}
	return p, nil
}

func (s *scanner) json(f frame, v any) error {
	b, err := s.payload(f)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return corrupt("frame %c: %v", f.kind&^compressed, err)
	}
	return nil
}
