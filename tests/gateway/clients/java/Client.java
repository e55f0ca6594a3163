// The official Java client as a program: takes one task as JSON, prints the result as JSON.
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentLinkedQueue;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.shaded.com.google.gson.Gson;
import org.apache.rocketmq.shaded.com.google.gson.JsonArray;
import org.apache.rocketmq.shaded.com.google.gson.JsonElement;
import org.apache.rocketmq.shaded.com.google.gson.JsonObject;

public final class Client {
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();

    private Client() {}

    private static ClientConfiguration configuration(JsonObject task) {
        return ClientConfiguration.newBuilder()
            .setEndpoints(task.get("endpoints").getAsString())
            .enableSsl(false)
            .build();
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
                String id = producer.send(message.build()).getMessageId().toString();
                sent.add(Collections.singletonMap("id", id));
            }
        }
        return Collections.singletonMap("sent", sent);
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
            "attempt", message.getDeliveryAttempt());
    }

    private static Object simple(JsonObject task) throws Exception {
        List<Object> received = new ArrayList<>();
        long end = System.nanoTime() + task.get("seconds").getAsLong() * 1_000_000_000L;
        Duration invisible = Duration.ofSeconds(task.get("invisible_s").getAsLong());
        try (SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration(task))
            .setConsumerGroup(task.get("group").getAsString())
            .setAwaitDuration(Duration.ofSeconds(2))
            .setSubscriptionExpressions(Collections.singletonMap(
                task.get("topic").getAsString(), FilterExpression.SUB_ALL))
            .build()) {
            while (received.size() < task.get("count").getAsInt() && System.nanoTime() < end) {
                for (MessageView message : consumer.receive(16, invisible)) {
                    received.add(view(message));
                    consumer.ack(message);
                }
            }
        }
        return Collections.singletonMap("received", received);
    }

    private static Object push(JsonObject task) throws Exception {
        ConcurrentLinkedQueue<Object> received = new ConcurrentLinkedQueue<>();
        long end = System.nanoTime() + task.get("seconds").getAsLong() * 1_000_000_000L;
        try (PushConsumer consumer = PROVIDER.newPushConsumerBuilder()
            .setClientConfiguration(configuration(task))
            .setConsumerGroup(task.get("group").getAsString())
            .setSubscriptionExpressions(Collections.singletonMap(
                task.get("topic").getAsString(), FilterExpression.SUB_ALL))
            .setMessageListener(message -> {
                received.add(view(message));
                return ConsumeResult.SUCCESS;
            })
            .build()) {
            while (received.size() < task.get("count").getAsInt() && System.nanoTime() < end) {
                Thread.sleep(50);
            }
            Thread.sleep(1_000); // the last acks leave
        }
        return Collections.singletonMap("received", new ArrayList<>(received));
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
        Object result = switch (task.get("op").getAsString()) {
            case "send" -> send(task);
            case "simple" -> simple(task);
            case "push" -> push(task);
            default -> contract();
        };
        System.out.println(gson.toJson(result));
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
