// The official Node.js client as a program: takes one task as JSON, prints the result as JSON.
'use strict';

const { Producer, SimpleConsumer, PushConsumer, ConsumeResult, FilterExpression } =
  require('rocketmq-client-nodejs');

// The package does not export them.
const TransactionResolution = { COMMIT: 1, ROLLBACK: 2 };
const FilterType = { TAG: 1, SQL: 2 };
const quiet = { info() {}, debug() {}, warn() {}, error() {} };

function options(task) {
  const sessionCredentials =
    task.access_key && { accessKey: task.access_key, accessSecret: task.secret };
  const sslEnabled = task.tls === true;
  const { endpoints } = task;
  return { endpoints, namespace: task.namespace || '', logger: quiet, sslEnabled, sessionCredentials };
}

function subscriptions(task) {
  const type = task.sql ? FilterType.SQL : FilterType.TAG;
  return new Map([[task.topic, new FilterExpression(task.sql || task.filter || '*', type)]]);
}

function view(message) {
  return {
    body: message.body.toString(),
    id: message.messageId,
    tag: message.tag || '',
    keys: [...message.keys].sort(),
    message_group: message.messageGroup || '',
    properties: Object.fromEntries(message.properties),
    attempt: message.deliveryAttempt,
    at_s: Date.now() / 1000,
  };
}

async function send(task) {
  const producer = new Producer({ ...options(task), topic: task.topic });
  await producer.startup();
  const sent = [];
  for (const one of task.messages) {
    const receipt = await producer.send({
      topic: task.topic,
      body: Buffer.from(one.body),
      tag: one.tag,
      keys: one.keys || [],
      messageGroup: one.message_group,
      deliveryTimestamp: one.deliver_at_s && new Date(one.deliver_at_s * 1000),
      properties: new Map(Object.entries(one.properties || {})),
    });
    const result = { id: receipt.messageId, offset: receipt.offset };
    if (one.recall) {
      result.recalled = (await producer.recallMessage(task.topic, receipt.recallHandle)).messageId;
    }
    sent.push(result);
  }
  await producer.shutdown();
  return { sent };
}

// Begins a transaction per message and ends it as the message says; answers checks meanwhile.
async function transactions(task) {
  const checked = [];
  const checker = {
    async check(message) {
      const body = message.body.toString();
      checked.push({ body, id: message.messageId });
      return task.answers[body] ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
    },
  };
  const producer = new Producer({ ...options(task), topic: task.topic, checker });
  await producer.startup();
  const sent = [];
  for (const one of task.messages) {
    const transaction = producer.beginTransaction();
    const message = { topic: task.topic, body: Buffer.from(one.body) };
    sent.push({ id: (await producer.send(message, transaction)).messageId });
    if (one.end === 'commit') await transaction.commit();
    if (one.end === 'rollback') await transaction.rollback();
  }
  const end = Date.now() + task.seconds * 1000;
  while (checked.length < (task.checks || 0) && Date.now() < end) {
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  if (task.checks) await producer.shutdown(); // without checks it just dies
  return { checked, sent };
}

async function simple(task) {
  const consumer = new SimpleConsumer({
    ...options(task),
    consumerGroup: task.group,
    subscriptions: subscriptions(task),
    awaitDuration: 2000,
  });
  await consumer.startup();
  const received = [];
  const end = Date.now() + task.seconds * 1000;
  while (received.length < task.count && Date.now() < end) {
    for (const message of await consumer.receive(16, task.invisible_s * 1000)) {
      received.push(view(message));
      if (task.give_back && message.deliveryAttempt === 1) {
        await consumer.changeInvisibleDuration(message, 0);
      } else if (task.ack !== false) {
        await consumer.ack(message);
      }
    }
  }
  await consumer.shutdown();
  return { received };
}

async function push(task) {
  const received = [];
  const failures = { ...task.fail };
  const consumer = new PushConsumer({
    ...options(task),
    consumerGroup: task.group,
    subscriptions: subscriptions(task),
    longPollingTimeout: 2000,
    messageListener: {
      async consume(message) {
        const body = message.body.toString();
        received.push(view(message));
        if (failures[body]) {
          failures[body] -= 1;
          return ConsumeResult.FAILURE;
        }
        return ConsumeResult.SUCCESS;
      },
    },
  });
  await consumer.startup();
  const end = Date.now() + task.seconds * 1000;
  while (received.length < task.count && Date.now() < end) {
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  await new Promise((resolve) => setTimeout(resolve, 1000)); // the last acks leave
  await consumer.shutdown();
  return { received };
}

function say(event) {
  process.stdout.write(`${JSON.stringify(event)}\n`);
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Returns an object whose `is` becomes true when the standard input ends.
function ended() {
  const over = { is: false };
  process.stdin.on('end', () => {
    over.is = true;
  });
  process.stdin.resume();
  return over;
}

// Sends numbered messages until the standard input ends; prints the outcome of each.
async function sendOn(task) {
  const over = ended();
  const producer = new Producer({ ...options(task), topic: task.topic });
  await producer.startup();
  for (let number = 1; !over.is; number += 1) {
    const body = String(number);
    try {
      await producer.send({ topic: task.topic, body: Buffer.from(body) });
      say({ sent: body });
    } catch (error) {
      say({ failed: body, error: String(error) }); // a service is away; it goes on
    }
    await pause(task.pause_s * 1000);
  }
  return {};
}

// Receives and acknowledges until the standard input ends; prints each event as it happens.
async function consumeOn(task) {
  const over = ended();
  const consumer = new SimpleConsumer({
    ...options(task),
    consumerGroup: task.group,
    subscriptions: subscriptions(task),
    awaitDuration: 1000,
  });
  await consumer.startup();
  while (!over.is) {
    let messages = [];
    try {
      messages = await consumer.receive(16, task.invisible_s * 1000);
    } catch (error) {
      say({ error: String(error) });
      await pause(100);
    }
    for (const message of messages) {
      const body = message.body.toString();
      say({ received: body, attempt: message.deliveryAttempt });
      try {
        await consumer.ack(message);
        say({ acknowledged: body });
      } catch (error) {
        say({ unsure: body, error: String(error) }); // the message may come again
      }
    }
  }
  return {};
}

const task = JSON.parse(process.argv[2]);
const operations = { send, simple, push, transactions, send_on: sendOn, consume_on: consumeOn };
operations[task.op](task).then(
  (result) => {
    process.stdout.write(`${JSON.stringify(result)}\n`, () => process.exit(0));
  },
  (error) => {
    process.stderr.write(`${error.stack}\n`, () => process.exit(1));
  },
);
