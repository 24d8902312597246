// Package docs checks what the documentation says and a program can check: blocks of Go compile, SQL is taken by the
// database, commands and their flags and settings exist, links lead somewhere.
package docs
