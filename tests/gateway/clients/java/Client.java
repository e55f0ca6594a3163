// The official Java client as a program: takes one task as JSON, prints the result as JSON.
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.shaded.com.google.gson.Gson;
import org.apache.rocketmq.shaded.com.google.gson.JsonArray;
import org.apache.rocketmq.shaded.com.google.gson.JsonElement;
import org.apache.rocketmq.shaded.com.google.gson.JsonObject;

public final class Client {
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();

    private Client() {}

    private static ClientConfiguration configuration(JsonObject task) {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder()
            .setEndpoints(task.get("endpoints").getAsString())
            .setNamespace(text(task, "namespace", ""))
            .enableSsl(flag(task, "tls", false));
        if (task.has("access_key")) {
            builder.setCredentialProvider(new StaticSessionCredentialsProvider(
                task.get("access_key").getAsString(), task.get("secret").getAsString()));
        }
        return builder.build();
    }

    private static String text(JsonObject task, String name, String otherwise) {
        return task.has(name) ? task.get(name).getAsString() : otherwise;
    }

    private static boolean flag(JsonObject task, String name, boolean otherwise) {
        return task.has(name) ? task.get(name).getAsBoolean() : otherwise;
    }

    private static Map<String, FilterExpression> subscription(JsonObject task) {
        FilterExpression filter = task.has("sql")
            ? new FilterExpression(task.get("sql").getAsString(), FilterExpressionType.SQL92)
            : new FilterExpression(text(task, "filter", "*"));
        return Collections.singletonMap(task.get("topic").getAsString(), filter);
    }

    private static Object send(JsonObject task) throws Exception {
        String topic = task.get("topic").getAsString();
        List<Object> sent = new ArrayList<>();
        try (Producer producer = PROVIDER.newProducerBuilder()
            .setClientConfiguration(configuration(task)).setTopics(topic).build()) {
            for (JsonElement each : task.getAsJsonArray("messages")) {
                JsonObject one = each.getAsJsonObject();
                MessageBuilder message = PROVIDER.newMessageBuilder().setTopic(topic)
                    .setBody(one.get("body").getAsString().getBytes(StandardCharsets.UTF_8));
                if (one.has("tag")) {
                    message.setTag(one.get("tag").getAsString());
                }
                if (one.has("message_group")) {
                    message.setMessageGroup(one.get("message_group").getAsString());
                }
                if (one.has("deliver_at_s")) {
                    message.setDeliveryTimestamp(one.get("deliver_at_s").getAsLong() * 1_000);
                }
                if (one.has("keys")) {
                    List<String> keys = new ArrayList<>();
                    one.getAsJsonArray("keys").forEach(key -> keys.add(key.getAsString()));
                    message.setKeys(keys.toArray(new String[0]));
                }
                if (one.has("properties")) {
                    for (Map.Entry<String, JsonElement> entry
                        : one.getAsJsonObject("properties").entrySet()) {
                        message.addProperty(entry.getKey(), entry.getValue().getAsString());
                    }
                }
                SendReceipt receipt = producer.send(message.build());
                Map<String, Object> result = new HashMap<>();
                result.put("id", receipt.getMessageId().toString());
                if (flag(one, "recall", false)) {
                    result.put("recalled", producer.recallMessage(topic, receipt.getRecallHandle())
                        .getMessageId().toString());
                }
                sent.add(result);
            }
        }
        return Collections.singletonMap("sent", sent);
    }

    // Begins a transaction per message and ends it as the message says; answers checks meanwhile.
    private static Object transactions(JsonObject task) throws Exception {
        String topic = task.get("topic").getAsString();
        ConcurrentLinkedQueue<Object> checked = new ConcurrentLinkedQueue<>();
        JsonObject answers =
            task.has("answers") ? task.getAsJsonObject("answers") : new JsonObject();
        Producer producer = PROVIDER.newProducerBuilder()
            .setClientConfiguration(configuration(task)).setTopics(topic)
            .setTransactionChecker(message -> {
                Map<String, Object> seen = view(message);
                checked.add(Map.of("body", seen.get("body"), "id", seen.get("id")));
                return flag(answers, (String) seen.get("body"), false)
                    ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
            })
            .build();
        List<Object> sent = new ArrayList<>();
        for (JsonElement each : task.getAsJsonArray("messages")) {
            JsonObject one = each.getAsJsonObject();
            Transaction transaction = producer.beginTransaction();
            String id = producer.send(PROVIDER.newMessageBuilder().setTopic(topic)
                .setBody(one.get("body").getAsString().getBytes(StandardCharsets.UTF_8)).build(),
                transaction).getMessageId().toString();
            sent.add(Collections.singletonMap("id", id));
            switch (one.get("end").getAsString()) {
                case "commit" -> transaction.commit();
                case "rollback" -> transaction.rollback();
                default -> { }
            }
        }
        int checks = task.has("checks") ? task.get("checks").getAsInt() : 0;
        long end = System.nanoTime() + task.get("seconds").getAsLong() * 1_000_000_000L;
        while (checked.size() < checks && System.nanoTime() < end) {
            Thread.sleep(50);
        }
        if (checks > 0) {
            producer.close(); // without checks it just dies
        }
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("checked", new ArrayList<>(checked));
        result.put("sent", sent);
        return result;
    }

    private static Map<String, Object> view(MessageView message) {
        ByteBuffer body = message.getBody();
        byte[] bytes = new byte[body.remaining()];
        body.get(bytes);
        return Map.of(
            "body", new String(bytes, StandardCharsets.UTF_8),
            "id", message.getMessageId().toString(),
            "tag", message.getTag().orElse(""),
            "keys", new TreeSet<>(message.getKeys()),
            "message_group", message.getMessageGroup().orElse(""),
            "properties", message.getProperties(),
            "attempt", message.getDeliveryAttempt(),
            "at_s", System.currentTimeMillis() / 1_000.0);
    }

    private static SimpleConsumer consumer(JsonObject task, int awaitSeconds) throws Exception {
        return PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration(task))
            .setConsumerGroup(task.get("group").getAsString())
            .setAwaitDuration(Duration.ofSeconds(awaitSeconds))
            .setSubscriptionExpressions(subscription(task))
            .build();
    }

    private static Object simple(JsonObject task) throws Exception {
        List<Object> received = new ArrayList<>();
        Duration invisible = Duration.ofSeconds(task.get("invisible_s").getAsLong());
        try (SimpleConsumer consumer = consumer(task, 2)) {
            long end = System.nanoTime() + task.get("seconds").getAsLong() * 1_000_000_000L;
            while (received.size() < task.get("count").getAsInt() && System.nanoTime() < end) {
                for (MessageView message : consumer.receive(16, invisible)) {
                    received.add(view(message));
                    if (flag(task, "give_back", false) && message.getDeliveryAttempt() == 1) {
                        consumer.changeInvisibleDuration(message, Duration.ZERO);
                    } else if (flag(task, "ack", true)) {
                        consumer.ack(message);
                    }
                }
            }
        }
        return Collections.singletonMap("received", received);
    }

    private static Object push(JsonObject task) throws Exception {
        ConcurrentLinkedQueue<Object> received = new ConcurrentLinkedQueue<>();
        Map<String, Integer> failures = new ConcurrentHashMap<>();
        if (task.has("fail")) {
            task.getAsJsonObject("fail").entrySet()
                .forEach(entry -> failures.put(entry.getKey(), entry.getValue().getAsInt()));
        }
        try (PushConsumer consumer = PROVIDER.newPushConsumerBuilder()
            .setClientConfiguration(configuration(task))
            .setConsumerGroup(task.get("group").getAsString())
            .setSubscriptionExpressions(subscription(task))
            .setMessageListener(message -> {
                Map<String, Object> seen = view(message);
                received.add(seen);
                String body = (String) seen.get("body");
                if (failures.getOrDefault(body, 0) > 0) {
                    failures.merge(body, -1, Integer::sum);
                    return ConsumeResult.FAILURE;
                }
                return ConsumeResult.SUCCESS;
            })
            .build()) {
            long end = System.nanoTime() + task.get("seconds").getAsLong() * 1_000_000_000L;
            while (received.size() < task.get("count").getAsInt() && System.nanoTime() < end) {
                Thread.sleep(50);
            }
            Thread.sleep(1_000); // the last acks leave
        }
        return Collections.singletonMap("received", new ArrayList<>(received));
    }

    private static void say(Object... event) {
        Map<String, Object> named = new LinkedHashMap<>();
        for (int index = 0; index < event.length; index += 2) {
            named.put((String) event[index], event[index + 1]);
        }
        System.out.println(new Gson().toJson(named));
        System.out.flush();
    }

    // Returns a latch that opens when the standard input ends.
    private static CountDownLatch ended() {
        CountDownLatch over = new CountDownLatch(1);
        Thread reader = new Thread(() -> {
            try {
                System.in.readAllBytes();
            } catch (IOException error) {
                error.printStackTrace();
            }
            over.countDown();
        });
        reader.setDaemon(true);
        reader.start();
        return over;
    }

    // Sends numbered messages until the standard input ends; prints the outcome of each.
    private static Object sendOn(JsonObject task) throws Exception {
        CountDownLatch over = ended();
        String topic = task.get("topic").getAsString();
        Producer producer = PROVIDER.newProducerBuilder()
            .setClientConfiguration(configuration(task)).setTopics(topic).build();
        long pauseMs = (long) (task.get("pause_s").getAsDouble() * 1_000);
        for (int number = 1; !over.await(pauseMs, TimeUnit.MILLISECONDS); number++) {
            String body = Integer.toString(number);
            try {
                producer.send(PROVIDER.newMessageBuilder().setTopic(topic)
                    .setBody(body.getBytes(StandardCharsets.UTF_8)).build());
                say("sent", body);
            } catch (Exception error) {
                say("failed", body, "error", error.toString()); // a service is away; it goes on
            }
        }
        return Map.of();
    }

    // Receives and acknowledges until the standard input ends; prints each event as it happens.
    private static Object consumeOn(JsonObject task) throws Exception {
        CountDownLatch over = ended();
        Duration invisible = Duration.ofSeconds(task.get("invisible_s").getAsLong());
        SimpleConsumer consumer = consumer(task, 1);
        while (over.getCount() > 0) {
            List<MessageView> messages = List.of();
            try {
                messages = consumer.receive(16, invisible);
            } catch (Exception error) {
                say("error", error.toString());
                Thread.sleep(100);
            }
            for (MessageView message : messages) {
                Map<String, Object> seen = view(message);
                say("received", seen.get("body"), "attempt", seen.get("attempt"));
                try {
                    consumer.ack(message);
                    say("acknowledged", seen.get("body"));
                } catch (Exception error) {
                    say("unsure", seen.get("body"), "error", error.toString());
                }
            }
        }
        return Map.of();
    }

    // The descriptors of the package: three files, in base64.
    private static Object contract() {
        JsonArray files = new JsonArray();
        for (byte[] file : List.of(
            apache.rocketmq.v2.MQDomain.getDescriptor().toProto().toByteArray(),
            apache.rocketmq.v2.MQService.getDescriptor().toProto().toByteArray(),
            apache.rocketmq.v2.MQAdmin.getDescriptor().toProto().toByteArray())) {
            files.add(Base64.getEncoder().encodeToString(file));
        }
        return Collections.singletonMap("files", files);
    }

    public static void main(String[] arguments) throws Exception {
        Gson gson = new Gson();
        JsonObject task = gson.fromJson(arguments[0], JsonObject.class);
        Object result = null;
        try {
            result = switch (task.get("op").getAsString()) {
                case "send" -> send(task);
                case "simple" -> simple(task);
                case "push" -> push(task);
                case "transactions" -> transactions(task);
                case "send_on" -> sendOn(task);
                case "consume_on" -> consumeOn(task);
                default -> contract();
            };
        } catch (Exception error) {
            error.printStackTrace();
            for (Throwable cause = error; cause != null; cause = cause.getCause()) {
                System.err.println(cause); // once more, after the long list of frames
            }
            Runtime.getRuntime().halt(1);
        }
        System.out.println(gson.toJson(result));
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
