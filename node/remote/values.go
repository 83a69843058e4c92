package remote

import (
	"encoding/json"

	"github.com/cove-sandbox/cove/sandbox"
)

// Values cross as JSON, but for two things: bytes go beside it, as they are, and
// the values of secrets, which show themselves to no encoder, are asked for.

// openSecret is a secret with its value.
type openSecret struct {
	sandbox.Secret
	Value string `json:"value"`
}

// detach takes the bytes out of vs, which is changed, in order.
func detach(vs []any) (blobs [][]byte) {
	for i, v := range vs {
		switch v := v.(type) {
		case []byte:
			blobs, vs[i] = append(blobs, v), nil
		case sandbox.ProcessEvent:
			if v.Output != nil {
				blobs = append(blobs, v.Output.Data)
				v.Output = &sandbox.Output{Stream: v.Output.Stream, Offset: v.Output.Offset}
				vs[i] = v
			}
		case []sandbox.Secret:
			open := make([]openSecret, len(v))
			for j, s := range v {
				open[j] = openSecret{s, s.Value.Reveal()}
			}
			vs[i] = open
		}
	}
	return blobs
}

// attach reads one value, whose bytes next gives.
func attach(p json.RawMessage, to any, next func() ([]byte, error)) error {
	switch to := to.(type) {
	case *[]byte:
		b, err := next()
		*to = b
		return err
	case *[]sandbox.Secret:
		var open []openSecret
		if err := json.Unmarshal(p, &open); err != nil {
			return broken(err)
		}
		*to = nil
		for _, s := range open {
			s.Secret.Value = sandbox.NewSecretValue(s.Value)
			*to = append(*to, s.Secret)
		}
		return nil
	}
	if err := json.Unmarshal(p, to); err != nil {
		return broken(err)
	}
	if ev, ok := to.(*sandbox.ProcessEvent); ok && ev.Output != nil {
		b, err := next()
		ev.Output.Data = b
		return err
	}
	return nil
}
