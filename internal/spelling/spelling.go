// Package spelling measures how far one word is from another, to suggest what a mistyped word may mean.
package spelling

// Distance returns how many bytes must be inserted, deleted or replaced to turn a into b (the Levenshtein
// distance). It takes time proportional to the product of their lengths.
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
