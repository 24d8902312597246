// One task of the bench, carried out by graphile-worker. The conversation on stdin and stdout
// is described in child.go.
import readline from "node:readline";
import { Logger, makeWorkerUtils, run, runMigrations } from "graphile-worker";
import pg from "pg";

const task = JSON.parse(process.argv[2]);
const logger = new Logger(() => () => {});
const jobs = 24;

let foreground = 0;
let all = 0;

function handle({ n }) {
  all++;
  if (n > 0) foreground++;
  else if (n < -1) console.log(`seen ${n} ${process.hrtime.bigint()}`);
}

// ready waits for go, and from then on tells how many jobs were handled.
async function ready() {
  const lines = readline.createInterface({ input: process.stdin });
  lines.once("close", () => process.exit(0));
  console.log("ready");
  await new Promise((resolve) => lines.once("line", resolve));
  let said = 0;
  setInterval(() => {
    if (all !== said) console.log(`handled ${foreground} ${(said = all)}`);
  }, 10);
}

// connected returns a pool with that many open connections.
async function connected(max) {
  const pool = new pg.Pool({ connectionString: task.url, max });
  const ignore = () => {}; // the database is dropped while we are connected
  pool.on("error", ignore);
  pool.on("connect", (client) => client.on("error", ignore));
  const clients = await Promise.all(Array.from({ length: max }, () => pool.connect()));
  for (const client of clients) client.release();
  return pool;
}

async function work() {
  const pgPool = await connected(task.start ? 10 : jobs + 1); // 10: the default of maxPoolSize
  await ready();
  await run({
    pgPool,
    noHandleSignals: true,
    taskList: { noop: async (payload) => handle(payload) },
    preset: {
      worker: task.start
        ? { logger }
        : {
            concurrentJobs: jobs,
            logger,
            completeJobBatchDelay: 0,
            failJobBatchDelay: 0,
            ...(task.idle || task.default ? {} : { localQueue: { size: 500, refetchDelay: { durationMs: 10 } } }),
          },
    },
  });
}

async function enqueue() {
  const [width, step] = task.bulk ? [4, 1000] : [8, 1];
  const utils = await makeWorkerUtils({ pgPool: await connected(width), logger });
  await ready();
  let next = 0;
  const producer = async () => {
    for (;;) {
      const from = next;
      if (from + step > task.runs) return;
      next += step;
      if (task.bulk) {
        await utils.addJobs(Array.from({ length: step }, (_, i) => ({ identifier: "noop", payload: { n: from + i + 1 } })));
      } else {
        await utils.addJob("noop", { n: next });
      }
    }
  };
  await Promise.all(Array.from({ length: width }, producer));
  console.log("done {}");
}

switch (task.do) {
  case "install":
    await runMigrations({ connectionString: task.url, logger });
    process.exit(0);
    break;
  case "work":
    await work();
    break;
  case "enqueue":
    await enqueue();
    break;
}
