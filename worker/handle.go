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

// Handle registers a typed function as the handler of a type:
//
//	worker.Handle(mux, "billing.invoice_charge.v1", billing.Charge)
//
// If a run.Task is passed instead of a string, the compiler checks that fn takes what is enqueued with it.
//
// The payload is decoded into In as encoding/json does it, with two exceptions: member names must match
// exactly, and numbers decoded into an interface become json.Number, so that no digit is lost. Members that In
// lacks are ignored. A payload that does not fit In fails the run at once, with code payload_invalid.
//
// The result is encoded from Out. A result that JSON cannot hold (NaN, invalid UTF-8, a channel) fails the run
// at once, with code result_rejected.
//
// Handle panics as HandleRaw does, and also if task is a prefix.
func Handle[In, Out any](m *Mux, task run.Task[In], fn func(context.Context, In) (Out, error), options ...Options) {
	typ := typeOf(task, fn == nil)
	m.HandleRaw(typ, func(ctx context.Context, payload stdjson.RawMessage) (stdjson.RawMessage, error) {
		in, err := decode[In](payload)
		if err != nil {
			return nil, err
		}
		out, err := fn(ctx, in)
		if err != nil {
			return nil, err
		}
		return encode(out)
	}, options...)
}

// typeOf returns the type of a task. It panics if that is none, or if the handler is nil.
func typeOf[In any](task run.Task[In], noHandler bool) string {
	typ := string(task)
	if noHandler {
		panic(fmt.Sprintf("worker: handler of %q is nil", typ))
	}
	if !naming.IsType(typ) {
		panic(fmt.Sprintf("worker: %q is not a type such as billing.charge.v1", typ))
	}
	return typ
}

// decode reads a payload. An error fails the run at once.
func decode[In any](payload stdjson.RawMessage) (in In, err error) {
	if err := json.Unmarshal(payload, &in, decoding); err != nil {
		return in, technical(settling.CodePayload, fmt.Errorf("decode payload: %w", err))
	}
	return in, nil
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
		// The decoder treats encoding/json's Number as an ordinary string.
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

// encode turns a result into JSON. Any error, including a panicking marshaller, rejects the result for good:
// the handler has done its work and must not do it again.
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

// technical returns an error that fails a run at once and is not the handler's fault.
func technical(code string, err error) error {
	return run.Permanent(settling.Technical(run.WithCode(code, err)))
}

func rejected(err error) error {
	return technical(settling.CodeResult, err)
}
