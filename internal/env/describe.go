package env

import (
	"cmp"
	"fmt"
	"io"
	"reflect"
	"strings"
	"text/tabwriter"
)

// A Description describes one variable for people.
type Description struct {
	Name    string
	Default string // what applies if it is unset; "" for nothing
	Bounds  string // what may be given
	Help    string
}

// Describe returns the variables of spec, a pointer to a struct of Settings, in order.
func Describe(spec any) []Description {
	var all []Description
	values := reflect.ValueOf(spec).Elem()
	fields := values.Type()
	for i := range fields.NumField() {
		tag := fields.Field(i).Tag
		preset := values.Field(i).Addr().Interface().(Named).self().preset
		d := Description{Name: tag.Get("envconfig"), Default: cmp.Or(preset, tag.Get("default"), tag.Get("otherwise")), Bounds: Bounds(tag), Help: tag.Get("help")}
		if d.Bounds == "" && fields.Field(i).Type == reflect.TypeFor[Bool]() {
			d.Bounds = "true or false"
		}
		all = append(all, d)
	}
	return all
}

// Bounds describes the values that a variable with this tag may have.
func Bounds(tag reflect.StructTag) string {
	switch text := tag.Get("bounds"); {
	case text != "":
		return text
	case tag.Get("oneof") != "":
		return strings.ReplaceAll(tag.Get("oneof"), "|", ", ")
	case tag.Get("min") == "":
		return ""
	}
	text := tag.Get("min") + " to " + tag.Get("max")
	if zero := tag.Get("zero"); zero != "" {
		text += ", or 0: " + zero
	}
	if none := tag.Get("none"); none != "" {
		text += ", or none: " + none
	}
	return text
}

// Print writes a table with a line for each variable of spec.
func Print(w io.Writer, spec any) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "  VARIABLE\tDEFAULT\tALLOWED\tMEANING")
	for _, d := range Describe(spec) {
		fmt.Fprintf(table, "  %s\t%s\t%s\t%s\n", d.Name, d.Default, d.Bounds, d.Help)
	}
	_ = table.Flush()
}
