package main

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/simple-workflow/simple-workflow/sql"
)

func newRoles() *cobra.Command {
	var t target
	named, show := "workflow", false
	roles := &cobra.Command{
		Use:   "roles",
		Short: "Create the roles for programs and people, and grant each what it needs",
		Long: `Create the roles for programs and people, and grant each what it needs. They cannot log in:
grant them to roles that can.

  workflow_owner       owns everything; grant it to the role that migrates
  workflow_enqueue     stores runs and events, and reads nothing
  workflow_worker      plain runs, of the prefixes it is bound to: see roles worker
  workflow_engine      all runs, processes, retention
  workflow_dispatcher  publishes events
  workflow_operator    sees everything, acts by the functions
  workflow_viewer      sees the state of things, without payloads
  workflow_tasks       sees, claims and completes the tasks of its groups: see join-group
  workflow_console     for programs that people act through: acts for them, with their rights

Repeat it after migrations. It needs the right to create roles, and must own what exists; the role that has owned
it so far is granted workflow_owner. No other role may be able to create anything in the schema. Roles
belong to the whole cluster: a second installation in it needs another name.`,
		Args: takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkNamed(named); err != nil {
				return err
			}
			if show {
				if err := checkSchema(t.schema); err != nil {
					return err
				}
				fmt.Fprint(cmd.OutOrStdout(), sql.RolesScript(named, t.schema))
				return nil
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				if err := sql.Roles(cmd.Context(), conn, named); err != nil {
					return inWords(err)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "roles %s_owner, _enqueue, _worker, _engine, _dispatcher, _operator, _viewer, _tasks and _console are there\n", named)
				return nil
			})
		},
	}
	roles.PersistentFlags().StringVar(&named, "named", named, "what the roles' names begin with")
	roles.Flags().BoolVar(&show, "print", show, "print the SQL instead; no database is needed")
	t.flags(roles.PersistentFlags())
	roles.AddCommand(newBindWorker(&t, &named))
	return roles
}

func newBindWorker(t *target, named *string) *cobra.Command {
	var prefixes []string
	bind := &cobra.Command{
		Use:   "worker ROLE",
		Short: "Bind a role to prefixes: a worker that sees, leases and settles runs of these alone",
		Long: `Bind a role to prefixes: a worker that sees, leases and settles runs of these alone, and no steps of
processes. It is created, without a login, if it is not there; what it was bound to before counts no more:

  workflowctl roles worker media_worker --prefixes media.,email.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("use: workflowctl roles worker ROLE --prefixes media.,email.")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNamed(*named); err != nil {
				return err
			}
			if len(prefixes) == 0 {
				return errors.New("--prefixes is missing: name those that the role may work on, such as media.,email.")
			}
			for _, p := range prefixes {
				if !aPrefix.MatchString(p) {
					return fmt.Errorf("--prefixes=%.120q: a prefix is lower-case and ends with a dot, such as billing.", p)
				}
			}
			return t.with(cmd.Context(), func(conn *pgx.Conn) error {
				if err := sql.BindWorker(cmd.Context(), conn, *named, args[0], prefixes); err != nil {
					return inWords(err)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "role %s works on %s\n", args[0], strings.Join(prefixes, ", "))
				return nil
			})
		},
	}
	bind.Flags().StringSliceVar(&prefixes, "prefixes", nil, "comma-separated prefixes, each ending with a dot")
	return bind
}

var (
	aPrefix = regexp.MustCompile(`^([a-z0-9_-]+\.)+$`)
	aName   = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)
)

func checkNamed(named string) error {
	if !aName.MatchString(named) {
		return fmt.Errorf("--named=%.120q: use up to 40 of a-z, 0-9 and _", named)
	}
	return nil
}
