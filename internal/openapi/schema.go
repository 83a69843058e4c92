package openapi

import (
	"google.golang.org/protobuf/reflect/protoreflect"
)

// schemaMaker adds to schemas what messages need, as protojson writes them.
type schemaMaker struct {
	words   comments
	schemas object
}

func (s *schemaMaker) call(svc protoreflect.ServiceDescriptor, m protoreflect.MethodDescriptor) object {
	op := object{
		"operationId": string(svc.Name()) + "_" + string(m.Name()),
		"tags":        []any{string(svc.Name())},
		"requestBody": object{"required": true, "content": jsonContent(s.message(m.Input()))},
		"responses": object{
			"200":     object{"description": "done", "content": jsonContent(s.message(m.Output()))},
			"default": object{"$ref": "#/components/responses/Error"},
		},
	}
	if text := s.words["rpc "+string(svc.Name())+"."+string(m.Name())]; text != "" {
		op["description"] = text
	}
	return op
}

// message is a reference to the schema of a message, which is made where it is new.
func (s *schemaMaker) message(d protoreflect.MessageDescriptor) object {
	if known := wellKnown[d.FullName()]; known != nil {
		return known
	}
	name := string(d.Name())
	if s.schemas[name] != nil {
		return reference(name)
	}
	fields := object{}
	schema := object{"type": "object", "properties": fields, "additionalProperties": false}
	s.schemas[name] = schema // before its fields: a message may hold itself
	if text := s.words["message "+name]; text != "" {
		schema["description"] = text
	}
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		field := s.field(f)
		if text := s.words[name+"."+string(f.Name())]; text != "" {
			if field["$ref"] != nil {
				field = object{"allOf": []any{field}}
			}
			described := object{"description": text}
			for k, v := range field {
				described[k] = v
			}
			field = described
		}
		fields[f.JSONName()] = field
	}
	return reference(name)
}

func (s *schemaMaker) field(f protoreflect.FieldDescriptor) object {
	switch {
	case f.IsMap():
		return object{"type": "object", "additionalProperties": s.value(f.MapValue())}
	case f.IsList():
		return object{"type": "array", "items": s.value(f)}
	}
	return s.value(f)
}

func (s *schemaMaker) value(f protoreflect.FieldDescriptor) object {
	switch f.Kind() {
	case protoreflect.BoolKind:
		return object{"type": "boolean"}
	case protoreflect.StringKind:
		return object{"type": "string"}
	case protoreflect.BytesKind:
		return object{"type": "string", "contentEncoding": "base64"}
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind, protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return object{"type": []any{"string", "integer"}, "format": "int64"} // written as text, read as either
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return object{"type": "number"}
	case protoreflect.EnumKind:
		var names []any
		for i := range f.Enum().Values().Len() {
			names = append(names, string(f.Enum().Values().Get(i).Name()))
		}
		return object{"type": "string", "enum": names}
	case protoreflect.MessageKind:
		return s.message(f.Message())
	}
	return object{"type": "integer", "format": "int32"}
}

var wellKnown = map[protoreflect.FullName]object{
	"google.protobuf.Duration":  {"type": "string", "examples": []any{"1.5s"}, "description": "seconds, with an s behind"},
	"google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
}
