// Package secret tells secrets from what is none.
package secret

import "fmt"

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
