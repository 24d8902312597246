#!/bin/sh
# report.sales.v1: payload {"day": "2026-01-31"} on standard input, the day's sales as JSON
# on standard output. They are read from $SHOP_DIR/sales/DAY.csv: product,pieces,cents.
set -eu

day=$(sed -n 's/.*"day" *: *"\([0-9][0-9-]*\)".*/\1/p')
if [ -z "$day" ]; then
	echo 'the payload has no "day" such as "2026-01-31"' >&2
	exit 65 # bad data: no further attempt
fi

awk -F, -v day="$day" '
	NF != 3 || $2 !~ /^[0-9]+$/ || $3 !~ /^[0-9]+$/ {
		print FILENAME ": line " FNR " is not product,pieces,cents" > "/dev/stderr"
		bad = 1
		exit 65
	}
	{
		pieces += $2
		cents += $2 * $3
		sold[$1] += $2
	}
	END {
		if (bad) exit 65
		for (product in sold) if (best == "" || sold[product] > sold[best]) best = product
		gsub(/[^A-Za-z0-9 _-]/, "", best)
		printf "{\"day\": \"%s\", \"pieces\": %d, \"cents\": %d, \"best\": \"%s\"}\n", day, pieces, cents, best
	}' "$SHOP_DIR/sales/$day.csv"
