package envoy

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
)

// Validate checks a message by the rules in its proto files and, recursively,
// every message packed into an Any inside it. Envoy applies the same rules,
// but refuses whole responses for one fault, and protoc-gen-validate alone
// looks into no Any. It returns all faults, each with the type that has it.
func Validate(m proto.Message) error {
	var faults []error
	faults = append(faults, validateRules(m))
	walk(m, func(inner proto.Message) {
		a, ok := inner.(*anypb.Any)
		if !ok {
			return
		}
		unpacked, err := a.UnmarshalNew()
		if err != nil {
			faults = append(faults, fmt.Errorf("unpack %q: %w", a.GetTypeUrl(), err))
			return
		}
		// walk goes into the payload by itself.
		faults = append(faults, validateRules(unpacked))
	})
	return errors.Join(faults...)
}

func validateRules(m proto.Message) error {
	v, ok := m.(interface{ ValidateAll() error })
	if !ok {
		return nil
	}
	if err := v.ValidateAll(); err != nil {
		return fmt.Errorf("%s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	return nil
}

// walk calls visit for m and every message inside it, the payloads of Anys
// included. An Any that can't be unpacked is visited but not entered.
func walk(m proto.Message, visit func(proto.Message)) {
	visit(m)
	if a, ok := m.(*anypb.Any); ok {
		if unpacked, err := a.UnmarshalNew(); err == nil {
			walk(unpacked, visit)
		}
		return
	}
	m.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
			if f.MapValue().Message() == nil {
				return true
			}
			v.Map().Range(func(_ protoreflect.MapKey, e protoreflect.Value) bool {
				walk(e.Message().Interface(), visit)
				return true
			})
		case f.Message() == nil:
		case f.IsList():
			for i := range v.List().Len() {
				walk(v.List().Get(i).Message().Interface(), visit)
			}
		default:
			walk(v.Message().Interface(), visit)
		}
		return true
	})
}
