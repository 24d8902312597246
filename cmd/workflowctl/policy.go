package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

func newPolicy() *cobra.Command {
	var t target
	var attempts int
	var base, limit, deadline time.Duration
	var curve, letter string
	drop, breaker := false, true
	policy := &cobra.Command{
		Use:   "policy PATTERN",
		Short: "Set how often and how long runs of a type, a prefix or all types (*) are tried",
		Long: `Set the policy of a type, of a prefix that ends with a dot, or of all types (*), as a whole. The policy
of a shorter prefix sets what is not given. It applies to runs that were enqueued with max_attempts 3, the default, from their next failure on.

  workflowctl policy billing. --attempts 50 --backoff-base 10s --backoff-cap 1h
  workflowctl policy billing.charge.v1 --attempts 1
  workflowctl policy mail. --deadline 48h
  workflowctl policy mail.poll.v1 --breaker=false
  workflowctl policy billing. --dead-letter ops.dead_letter.v1
  workflowctl policy billing. --drop
  workflowctl show policies
  workflowctl show policy-history`,
		Args: takes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			set := cmd.Flags().Changed("attempts") || cmd.Flags().Changed("backoff-base") || cmd.Flags().Changed("backoff-cap") || curve != "" || cmd.Flags().Changed("deadline") || letter != "" || cmd.Flags().Changed("breaker")
			if drop == set {
				return fmt.Errorf("policy %.120s: give --attempts, --backoff-base, --backoff-cap, --curve, --deadline, --dead-letter or --breaker, or --drop alone", args[0])
			}
			if cmd.Flags().Changed("attempts") && (attempts < 1 || attempts > 1000) {
				return fmt.Errorf("--attempts=%d: use 1 to 1000", attempts)
			}
			query, values := `SELECT workflow_drop_policy($1)`, []any{args[0]}
			if set {
				query = `SELECT workflow_set_policy($1, attempts => $2, backoff_base => $3, backoff_cap => $4, curve => nullif($5::text, ''), deadline => $6, dead_letter => nullif($7::text, ''), breaker => $8)`
				values = append(values, given(cmd, "attempts", attempts), given(cmd, "backoff-base", base), given(cmd, "backoff-cap", limit), curve, given(cmd, "deadline", deadline), letter, given(cmd, "breaker", breaker))
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				var answer string
				if err := conn.QueryRow(cmd.Context(), query, values...).Scan(&answer); err != nil {
					return inWords(err)
				}
				if drop && answer != "dropped" {
					return errors.New(answer)
				}
				fmt.Fprintln(cmd.OutOrStdout(), answer)
				return nil
			})
		},
	}
	policy.Flags().IntVar(&attempts, "attempts", 0, "how often a run may be started")
	policy.Flags().DurationVar(&base, "backoff-base", 0, "the pause before the second attempt")
	policy.Flags().DurationVar(&limit, "backoff-cap", 0, "the longest pause; up to half of the pause is added at random")
	policy.Flags().StringVar(&curve, "curve", "", "how the pause grows: exponential, linear or constant")
	policy.Flags().DurationVar(&deadline, "deadline", 0, "how long after it was enqueued a run may still be started")
	policy.Flags().BoolVar(&breaker, "breaker", true, "whether outages of a type open a breaker, which reduces its leases to probes")
	policy.Flags().StringVar(&letter, "dead-letter", "", "the type of the run that is enqueued for each run that fails for good; none: no such run")
	policy.Flags().BoolVar(&drop, "drop", false, "remove the policy; those of shorter prefixes apply")
	t.flags(policy.Flags())
	return policy
}

// given returns a pointer to a flag's value, or nil if the flag was not given.
func given[T any](cmd *cobra.Command, flag string, value T) *T {
	if !cmd.Flags().Changed(flag) {
		return nil
	}
	return &value
}
