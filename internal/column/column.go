// Package column turns rows into the columns that a statement with unnest takes as arguments.
package column

// Of returns one field of all rows. Pass ids as [16]byte: pgx encodes a uuid.UUID, which has methods for database/sql, twenty
// times more slowly.
func Of[R, T any](rows []R, field func(R) T) []T {
	all := make([]T, len(rows))
	for i, r := range rows {
		all[i] = field(r)
	}
	return all
}
