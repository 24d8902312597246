// Package secret detects secrets that are easy to guess.
package secret

import "fmt"

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
