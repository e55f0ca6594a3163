// Fills a topic, or receives and acknowledges its messages, with the official Java client.
// Arguments: fill|join|drain, endpoints, topic, group, messages. Prints the count and milliseconds.
// `join` ends when each thread has had one answer: then the server knows the group.
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;

public final class Drain {
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final int SENDS_IN_FLIGHT = 200;
    private static final int THREADS = 4;
    private static final int BATCH = 32;
    private static final Duration INVISIBLE = Duration.ofSeconds(60);
    private static final int EMPTY_MAX = 12;
    private static final int FAILURES_MAX = 20;
    private static final AtomicReference<Exception> FAILURE = new AtomicReference<>();

    private Drain() {}

    private static int fill(ClientConfiguration configuration, String topic, int count)
        throws Exception {
        ArrayDeque<CompletableFuture<?>> sends = new ArrayDeque<>();
        byte[] body = new byte[100];
        try (Producer producer = PROVIDER.newProducerBuilder()
            .setClientConfiguration(configuration).setTopics(topic).build()) {
            for (int number = 0; number < count; number++) {
                sends.add(producer.sendAsync(
                    PROVIDER.newMessageBuilder().setTopic(topic).setBody(body).build()));
                if (sends.size() >= SENDS_IN_FLIGHT) {
                    sends.poll().get();
                }
            }
            for (CompletableFuture<?> send : sends) {
                send.get();
            }
        }
        return count;
    }

    private static void receive(SimpleConsumer consumer, AtomicInteger left, int emptyMax) {
        int empty = 0;
        int failures = 0;
        while (left.get() > 0 && empty < emptyMax && failures < FAILURES_MAX) {
            try {
                List<MessageView> messages = consumer.receive(BATCH, INVISIBLE);
                empty = messages.isEmpty() ? empty + 1 : 0;
                List<CompletableFuture<Void>> acks = new ArrayList<>();
                for (MessageView message : messages) {
                    acks.add(consumer.ackAsync(message));
                }
                for (CompletableFuture<Void> ack : acks) {
                    try {
                        ack.get();
                        left.decrementAndGet();
                    } catch (ExecutionException failure) {
                        FAILURE.set(failure); // the message is delivered once more
                    }
                }
            } catch (Exception failure) {
                failures++; // the server does not know the consumer yet
                FAILURE.set(failure);
            }
        }
    }

    private static int drain(
        ClientConfiguration configuration, String topic, String group, int count, int emptyMax)
        throws Exception {
        AtomicInteger left = new AtomicInteger(count);
        try (SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration)
            .setConsumerGroup(group)
            .setAwaitDuration(Duration.ofSeconds(1))
            .setSubscriptionExpressions(
                Collections.singletonMap(topic, FilterExpression.SUB_ALL))
            .build()) {
            List<Thread> threads = new ArrayList<>();
            for (int number = 0; number < THREADS; number++) {
                threads.add(new Thread(() -> receive(consumer, left, emptyMax)));
            }
            for (Thread thread : threads) {
                thread.start();
            }
            for (Thread thread : threads) {
                thread.join();
            }
        }
        return count - left.get();
    }

    public static void main(String[] arguments) throws Exception {
        ClientConfiguration configuration = ClientConfiguration.newBuilder()
            .setEndpoints(arguments[1]).enableSsl(false)
            .setRequestTimeout(Duration.ofSeconds(30)) // the default of 3 s ends a run on a busy machine
            .build();
        int count = Integer.parseInt(arguments[4]);
        long begin = System.nanoTime();
        int done = arguments[0].equals("fill")
            ? fill(configuration, arguments[2], count)
            : drain(configuration, arguments[2], arguments[3], count,
                arguments[0].equals("join") ? 1 : EMPTY_MAX);
        if (FAILURE.get() != null) {
            System.out.println("last failure of a call: " + FAILURE.get());
        }
        System.out.println(done + " " + (System.nanoTime() - begin) / 1_000_000);
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
