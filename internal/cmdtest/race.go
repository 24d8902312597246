//go:build race

package cmdtest

const raceDetector = true
