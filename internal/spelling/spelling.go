// Package spelling tells how far one word is from another, for those who may have mistyped it.
package spelling

// Distance returns how many bytes must be put in, left out or changed to make b of a (Levenshtein).
// It takes time by the product of their lengths.
func Distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := corner
			if a[i] != b[j] {
				change++
			}
			corner = row[j+1]
			row[j+1] = min(change, row[j]+1, corner+1)
		}
	}
	return row[len(b)]
}
