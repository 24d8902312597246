// Package logs sets up logging: coloured lines for people at a terminal, JSON elsewhere.
package logs

import (
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/lmittmann/tint"
	"golang.org/x/term"
)

// Levels and Formats are the words that New accepts, for the tag oneof of a setting.
const (
	Levels  = "debug|info|warn|error"
	Formats = "auto|text|json"
)

// New returns a logger that writes to w. Format auto means text if w is a terminal, and
// JSON otherwise.
func New(w *os.File, level, format string) *slog.Logger {
	terminal := term.IsTerminal(int(w.Fd()))
	return slog.New(handler(w, levelOf(level), format == "text" || format == "auto" && terminal, terminal))
}

func handler(w io.Writer, level slog.Level, text, terminal bool) slog.Handler {
	if text {
		plain := !terminal || os.Getenv("NO_COLOR") != ""
		return tint.NewTextHandler(w, &tint.Options{Level: level, NoColor: plain, TimeFormat: "2006-01-02 15:04:05.000"})
	}
	return slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: readable})
}

// readable writes a duration as 1m30s instead of as a number of nanoseconds.
func readable(_ []string, a slog.Attr) slog.Attr {
	if d, ok := a.Value.Any().(time.Duration); ok {
		a.Value = slog.StringValue(d.String())
	}
	return a
}

func levelOf(name string) (level slog.Level) {
	if err := level.UnmarshalText([]byte(name)); err != nil {
		return slog.LevelInfo
	}
	return level
}
