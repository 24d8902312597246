package env

import (
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A parser is a Setting that parses its text into its Value, or returns what would be right.
type parser interface {
	Named
	parse(tag reflect.StructTag) (fix string)
}

func (s *Setting[T]) parse(tag reflect.StructTag) (fix string) {
	switch value := any(&s.Value).(type) {
	case *time.Duration:
		*value, fix = duration(s.text, tag)
	case *int:
		*value, fix = whole(s.text, tag)
	case *bool:
		*value, fix = yes(s.text)
	case *string:
		*value, fix = word(s.text, tag)
	case *[]string:
		*value = strings.Split(s.text, ",")
	default:
		panic("env: no such kind of setting")
	}
	return fix
}

func duration(text string, tag reflect.StructTag) (time.Duration, string) {
	if text == "none" && tag.Get("none") != "" {
		return None, ""
	}
	d, err := time.ParseDuration(text)
	if _, number := strconv.ParseFloat(text, 64); err != nil && number == nil {
		return 0, "use a duration with a unit, such as " + example(text)
	}
	if err != nil {
		return 0, "use a duration such as 500ms, 30s, 5m or 1h30m" + orNone(tag)
	}
	if d == 0 && tag.Get("zero") != "" {
		return 0, ""
	}
	if least, most := bound(tag, "min"), bound(tag, "max"); d < least || d > most {
		return 0, "use " + Bounds(tag) + tag.Get("because")
	}
	return d, ""
}

// example appends the unit s to a number, if that makes a duration.
func example(number string) string {
	if d, err := time.ParseDuration(number + "s"); err == nil && d > 0 {
		return number + "s"
	}
	return "30s"
}

func orNone(tag reflect.StructTag) string {
	if tag.Get("none") != "" {
		return ", or none"
	}
	return ""
}

func bound(tag reflect.StructTag, name string) time.Duration {
	d, err := time.ParseDuration(tag.Get(name))
	if err != nil {
		panic("env: a Duration needs the tags min and max: " + string(tag))
	}
	return d
}

func whole(text string, tag reflect.StructTag) (int, string) {
	least, err1 := strconv.Atoi(tag.Get("min"))
	most, err2 := strconv.Atoi(tag.Get("max"))
	if err1 != nil || err2 != nil {
		panic("env: an Int needs the tags min and max: " + string(tag))
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, "use a whole number, " + Bounds(tag)
	}
	return n, ""
}

func yes(text string) (bool, string) {
	b, err := strconv.ParseBool(text)
	if err != nil {
		return false, "use true or false"
	}
	return b, ""
}

func word(text string, tag reflect.StructTag) (string, string) {
	allowed := tag.Get("oneof")
	if allowed == "" {
		return text, ""
	}
	text = strings.ToLower(text)
	if !slices.Contains(strings.Split(allowed, "|"), text) {
		return "", "use one of " + strings.ReplaceAll(allowed, "|", ", ")
	}
	return text, ""
}
