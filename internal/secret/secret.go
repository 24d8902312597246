// Package secret detects secrets that are easy to guess.
package secret

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// least is the least number of different characters of a secret. A random secret has fewer only rarely: even one of
// sixteen digits does once in some thousand times.
const least = 5

// Weak returns why a secret is easy to guess, however long it is; "" if it is not. The text does not contain
// the secret.
func Weak[T string | []byte](secret T) (why string) {
	different := map[byte]bool{}
	for i := range len(secret) {
		different[secret[i]] = true
	}
	if n := len(different); n < least {
		return fmt.Sprintf("it has only %d different characters, and could be guessed; use one that was drawn, for example from: openssl rand -hex 24", n)
	}
	return ""
}

// MinKey is the least number of bytes of a key.
const MinKey = 24

// Key returns the signing key of a webhook's secret: the base64 after whsec_, or else the bytes of text itself. It is nil for "".
// The error says that the secret is too short, is not valid base64, or is easy to guess.
func Key(text string) ([]byte, error) {
	if text == "" {
		return nil, nil
	}
	key := []byte(text)
	if coded, ok := strings.CutPrefix(text, "whsec_"); ok {
		var err error
		if key, err = base64.StdEncoding.DecodeString(coded); err != nil {
			return nil, errors.New("what follows whsec_ is not base64; see: echo whsec_$(openssl rand -base64 24)")
		}
	}
	if len(key) < MinKey {
		return nil, fmt.Errorf("it has %d bytes; use at least %d, for example from: openssl rand -hex 24", len(key), MinKey)
	}
	if why := Weak(key); why != "" {
		return nil, errors.New(why)
	}
	return key, nil
}
