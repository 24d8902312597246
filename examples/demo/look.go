package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
)

const queries = `
    SELECT type, status, count(*) FROM workflow_run GROUP BY 1, 2 ORDER BY 1, 2;
    SELECT created_at, event_type, attempt, actor, data FROM workflow_event
     WHERE workflow_id IN (SELECT workflow_id FROM workflow_event WHERE event_type = 'expired') ORDER BY workflow_id, id;
    SELECT event_type, delivered_to, count(*), max(published_at - created_at) FROM outbox_event GROUP BY 1, 2 ORDER BY 1;
    SELECT status, output_payload, failure_reason, count(*) FROM process_instance GROUP BY 1, 2, 3;
    SELECT node_id, run_type, status, attempts, completed_at FROM activity_instance
     WHERE instance_id = (SELECT id FROM process_instance WHERE business_key = 'o-3') ORDER BY created_at;

The other workers are still there. Give them something to do:

    INSERT INTO workflow_run (type, payload)
    VALUES ('media.thumbnail.v1', '{"image": "photo-1.jpg", "width": 800}') RETURNING id;

    INSERT INTO workflow_run (type, payload) VALUES ('graph.start.v1', '{"process": "order", "key": "o-101",
        "input": {"order": "o-101", "item": "cup", "pieces": 1, "card": "good", "cents": 900}}');
`

// lookAround keeps everything running for the user to look at, until Enter (unless keep is set) or an interrupt.
func (d *demo) lookAround(ctx context.Context, keep bool) {
	say("\nLook around:\n\n    %s\n%s\nThumbnails are in %s/thumbnails, events in %s.", d.psql(), queries, d.shop(), d.events())
	if keep {
		say("Everything stays up until interrupted.")
		<-ctx.Done()
		return
	}
	say("Press Enter to end.")
	entered := make(chan struct{})
	go func() {
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n') // the end of input counts as well
		close(entered)
	}()
	select {
	case <-entered:
	case <-ctx.Done():
		say("") // the terminal has written ^C
	}
}

// psql returns the command that leads to the demo's tables.
func (d *demo) psql() string {
	if d.schema != "" {
		return fmt.Sprintf(`PGOPTIONS='-c search_path=%s' psql "$DEMO_DATABASE_URL"`, d.schema)
	}
	return fmt.Sprintf("psql '%s'", d.url)
}
