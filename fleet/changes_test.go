package fleet

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestChangesSeesEveryKeyOfServe: what it doesn't see a reload would take without effect.
func TestChangesSeesEveryKeyOfServe(t *testing.T) {
	for i := range reflect.TypeFor[Serve]().NumField() {
		var changed Serve
		change(reflect.ValueOf(&changed).Elem().Field(i))
		name := reflect.TypeFor[Serve]().Field(i).Name
		got := (&Serve{}).Changes(&changed)
		if len(got) != 1 || !strings.EqualFold(got[0], "serve."+name) {
			t.Errorf("%s changed: %q", name, got)
		}
	}
	if got := new(Serve).Changes(new(Serve)); !slices.Equal(got, nil) {
		t.Errorf("nothing changed: %q", got)
	}
}

// change makes a zero value another one: of a struct, its first field.
func change(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		change(v.Field(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
	case reflect.String:
		v.SetString("x")
	default:
		v.Set(reflect.ValueOf(1).Convert(v.Type()))
	}
}
