package worker

import (
	"cmp"
	"context"
	stdjson "encoding/json"
	"errors"
	"fmt"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	jsonv1 "github.com/go-json-experiment/json/v1"

	"github.com/simple-workflow/simple-workflow/internal/naming"
	"github.com/simple-workflow/simple-workflow/internal/settling"
	"github.com/simple-workflow/simple-workflow/run"
)

// Handle registers an ordinary function as the handler of a type:
//
//	worker.Handle(mux, "billing.invoice_charge.v1", billing.Charge)
//
// With a run.Task in place of the name, the compiler checks that the handler takes what is enqueued.
//
// The payload is decoded into In as encoding/json does, but member names must match
// exactly and numbers that land in an interface stay json.Number, so that no digit is lost.
// A payload that does not fit In fails the run at once (code payload_invalid); members that
// In lacks are ignored. The result is encoded from Out; one that JSON cannot hold (NaN,
// invalid UTF-8, a channel) fails the run without another start (code result_rejected).
// Handle panics as HandleRaw does, and on a prefix.
func Handle[In, Out any](m *Mux, task run.Task[In], fn func(context.Context, In) (Out, error), options ...Options) {
	typ := string(task)
	if fn == nil {
		panic(fmt.Sprintf("worker: handler of %q is nil", typ))
	}
	if !naming.IsType(typ) {
		panic(fmt.Sprintf("worker: %q is not a type such as billing.charge.v1", typ))
	}
	m.HandleRaw(typ, func(ctx context.Context, payload stdjson.RawMessage) (stdjson.RawMessage, error) {
		var in In
		if err := json.Unmarshal(payload, &in, decoding); err != nil {
			return nil, technical(settling.CodePayload, fmt.Errorf("decode payload: %w", err))
		}
		out, err := fn(ctx, in)
		if err != nil {
			return nil, err
		}
		return encode(out)
	}, options...)
}

var decoding = json.JoinOptions(
	jsonv1.DefaultOptionsV1(),
	json.MatchCaseInsensitiveNames(false),
	jsontext.AllowDuplicateNames(false),
	jsontext.AllowInvalidUTF8(false),
	json.WithUnmarshalers(json.JoinUnmarshalers(
		json.UnmarshalFromFunc(func(dec *jsontext.Decoder, v *any) error {
			if dec.PeekKind() != '0' {
				return errors.ErrUnsupported
			}
			number, err := dec.ReadValue()
			*v = stdjson.Number(number)
			return err
		}),
		// To the decoder the number of encoding/json is a string like any other.
		json.UnmarshalFromFunc(func(dec *jsontext.Decoder, v *stdjson.Number) error {
			switch dec.PeekKind() {
			case '0':
				number, err := dec.ReadValue()
				*v = stdjson.Number(number)
				return err
			case '"':
				return errors.New("a number is wanted, this is a string")
			}
			return errors.ErrUnsupported
		}),
	)),
)

var encoding = json.JoinOptions(
	jsonv1.DefaultOptionsV1(),
	jsontext.AllowDuplicateNames(false),
	jsontext.AllowInvalidUTF8(false),
	jsontext.EscapeForHTML(false),
	jsontext.EscapeForJS(false),
	json.WithMarshalers(json.MarshalToFunc(func(enc *jsontext.Encoder, v stdjson.Number) error {
		return enc.WriteValue(jsontext.Value(cmp.Or(v, "0")))
	})),
)

// encode turns a result into JSON. Any trouble, a panicking marshaller included, is a
// rejected result: the handler has done its work and must not do it again.
func encode(out any) (data stdjson.RawMessage, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = rejected(fmt.Errorf("encode result: panic: %v", p))
		}
	}()
	data, err = json.Marshal(out, encoding)
	if err != nil {
		return nil, rejected(fmt.Errorf("encode result: %w", err))
	}
	return data, nil
}

// technical is an error that ends a run at once, and that is not its handler's.
func technical(code string, err error) error {
	return run.Permanent(settling.Technical(run.WithCode(code, err)))
}

func rejected(err error) error {
	return technical(settling.CodeResult, err)
}
