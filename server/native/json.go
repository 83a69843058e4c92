package native

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// strictJSON is Connect's JSON codec with two differences. It refuses fields it
// does not know: a misspelt "memroy" must not be silently ignored, and neither
// must a protection only a newer server gives. And where a value does not
// parse it names the field, which protojson gives as line and column.
type strictJSON struct{ name string }

func (c strictJSON) Name() string { return c.name }

func (c strictJSON) Marshal(m any) ([]byte, error) {
	pm, ok := m.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no message", m)
	}
	return protojson.Marshal(pm)
}

func (c strictJSON) Unmarshal(b []byte, m any) error {
	pm, ok := m.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no message", m)
	}
	if len(b) == 0 {
		return errors.New("an empty body is no JSON; send {} where there is nothing to say")
	}
	err := protojson.Unmarshal(b, pm)
	if err == nil {
		return nil
	}
	if holdsSecret(pm.ProtoReflect().Descriptor()) {
		// protojson quotes what it does not like, and errors are logged.
		err = errors.New("it is not JSON as the protos have it")
	}
	if field := wrongField(b, pm.ProtoReflect().Descriptor(), pm.ProtoReflect().Type()); field != "" {
		return fmt.Errorf("%s: %w", field, err)
	}
	return err
}

// holdsSecret says whether a message has a field that nobody may print.
func holdsSecret(desc protoreflect.MessageDescriptor) bool {
	for i := range desc.Fields().Len() {
		if o, ok := desc.Fields().Get(i).Options().(*descriptorpb.FieldOptions); ok && o.GetDebugRedact() {
			return true
		}
	}
	return false
}

// wrongField finds the field of a message that does not parse by trying each
// alone; "" if it is not one field's fault. Only errors pay for it.
func wrongField(b []byte, desc protoreflect.MessageDescriptor, typ protoreflect.MessageType) string {
	var values map[string]json.RawMessage
	if json.Unmarshal(b, &values) != nil {
		return ""
	}
	keys := make([]string, 0, len(values))
	for k := range values {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		one, err := json.Marshal(map[string]json.RawMessage{k: values[k]})
		if err != nil || protojson.Unmarshal(one, typ.New().Interface()) == nil {
			continue
		}
		fd := desc.Fields().ByJSONName(k)
		if fd == nil {
			fd = desc.Fields().ByName(protoreflect.Name(k))
		}
		if fd == nil {
			return fmt.Sprintf("%.80q", k)
		}
		name := string(fd.Name())
		if fd.Message() != nil && !fd.IsMap() && !fd.IsList() {
			if inner := wrongField(values[k], fd.Message(), typ.New().NewField(fd).Message().Type()); inner != "" {
				return name + "." + inner
			}
		}
		return name
	}
	return ""
}
