// Package docs checks those statements of the documentation that a program can check: Go blocks compile, the database
// accepts the SQL, commands, flags and settings exist, and links lead to existing headings. It has tests only.
package docs
