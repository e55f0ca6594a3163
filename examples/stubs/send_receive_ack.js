// Send, receive and acknowledge with a plain gRPC stub: no client library of RocketMQ or BatonMQ.
//
//   baton up --data-dir /tmp/baton --gateway         in another terminal
//   baton topic create orders
//   npm install @grpc/grpc-js @grpc/proto-loader
//   node examples/stubs/send_receive_ack.js [127.0.0.1:8081]
'use strict';

const assert = require('node:assert');
const crypto = require('node:crypto');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const protos = path.join(__dirname, '..', '..', 'protos');
const definition = loader.loadSync('apache/rocketmq/v2/service.proto', {
  includeDirs: [protos], enums: String, keepCase: true,
});
const { MessagingService } = grpc.loadPackageDefinition(definition).apache.rocketmq.v2;
const gateway = new MessagingService(
  process.argv[2] || '127.0.0.1:8081', grpc.credentials.createInsecure());

// Every call names its client, and has a deadline.
const metadata = new grpc.Metadata();
metadata.set('x-mq-client-id', `stub@${process.pid}@0@${crypto.randomUUID()}`);
const deadline = () => ({ deadline: Date.now() + 20_000 });
const topic = { name: 'orders' };
const group = { name: 'stubs' };

function call(name, request) {
  return new Promise((resolve, reject) => {
    gateway[name](request, metadata, deadline(), (error, answer) => {
      if (error) reject(error);
      else if (answer.status.code !== 'OK') reject(new Error(`${name}: ${answer.status.message}`));
      else resolve(answer);
    });
  });
}

async function receive() {
  const messages = [];
  const frames = gateway.ReceiveMessage({
    group, message_queue: { topic }, batch_size: 16,
    filter_expression: { type: 'TAG', expression: '*' },
    invisible_duration: { seconds: 30 }, long_polling_timeout: { seconds: 15 },
  }, metadata, deadline());
  for await (const frame of frames) {
    if (frame.message) messages.push(frame.message);
  }
  return messages;
}

async function main() {
  const body = Buffer.from(`paid ${crypto.randomUUID()}`);
  const system_properties = { message_id: crypto.randomUUID(), body_encoding: 'IDENTITY' };
  await call('SendMessage', { messages: [{ topic, body, system_properties }] });
  let found = false;
  while (!found) {
    const messages = await receive();
    assert(messages.length > 0, 'no message arrived');
    const entries = messages.map((one) => one.system_properties)
      .map(({ message_id, receipt_handle }) => ({ message_id, receipt_handle }));
    await call('AckMessage', { group, topic, entries }); // answered when it is durable
    found = messages.some((one) => one.body.equals(body));
  }
  console.log(`sent, received and acknowledged: ${body}`);
  gateway.close();
}

main().catch((error) => { console.error(error); process.exit(1); });
