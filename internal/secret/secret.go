// Package secret tells secrets from what is none.
package secret

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// least is how many different characters a secret has at least. One that was drawn, even of sixteen
// digits, has fewer once in some thousand times.
const least = 5

// Weak returns why nobody should take this for a secret, however long it is: "" if nothing is against
// it. It does not say what the secret is.
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

// Key returns the bytes that the secret of a webhook signs with, nil for an empty one: what text says in base64 after whsec_, and
// else text itself.
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
