// The official Go client as a program: takes one task as JSON, prints the result as JSON.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sort"
	"sync"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
)

type outgoing struct {
	Body         string            `json:"body"`
	Tag          string            `json:"tag"`
	Keys         []string          `json:"keys"`
	Properties   map[string]string `json:"properties"`
	MessageGroup string            `json:"message_group"`
	DeliverAtS   int64             `json:"deliver_at_s"`
	Recall       bool              `json:"recall"`
	End          string            `json:"end"`
}

type task struct {
	Op         string          `json:"op"`
	Endpoints  string          `json:"endpoints"`
	Topic      string          `json:"topic"`
	Group      string          `json:"group"`
	Namespace  string          `json:"namespace"`
	TLS        bool            `json:"tls"`
	AccessKey  string          `json:"access_key"`
	Secret     string          `json:"secret"`
	Filter     string          `json:"filter"`
	SQL        string          `json:"sql"`
	Messages   []outgoing      `json:"messages"`
	Count      int             `json:"count"`
	Seconds    int             `json:"seconds"`
	InvisibleS int             `json:"invisible_s"`
	Ack        *bool           `json:"ack"`
	GiveBack   bool            `json:"give_back"`
	Fail       map[string]int  `json:"fail"`
	Checks     int             `json:"checks"`
	Answers    map[string]bool `json:"answers"`
	PauseS     float64         `json:"pause_s"`
}

type view struct {
	Body         string            `json:"body"`
	ID           string            `json:"id"`
	Tag          string            `json:"tag"`
	Keys         []string          `json:"keys"`
	MessageGroup string            `json:"message_group"`
	Properties   map[string]string `json:"properties"`
	Attempt      int32             `json:"attempt"`
	AtS          float64           `json:"at_s"`
}

func text(value *string) string {
	if value == nil {
		return ""
	}
	return *value
}

func viewOf(message *rmq.MessageView) view {
	keys := append([]string{}, message.GetKeys()...)
	sort.Strings(keys)
	return view{
		Body: string(message.GetBody()), ID: message.GetMessageId(), Tag: text(message.GetTag()), Keys: keys,
		MessageGroup: text(message.GetMessageGroup()), Properties: message.GetProperties(),
		Attempt: message.GetDeliveryAttempt(), AtS: float64(time.Now().UnixMilli()) / 1_000,
	}
}

func (t *task) config() *rmq.Config {
	rmq.EnableSsl = t.TLS
	return &rmq.Config{
		Endpoint: t.Endpoints, NameSpace: t.Namespace, ConsumerGroup: t.Group,
		Credentials: &credentials.SessionCredentials{AccessKey: t.AccessKey, AccessSecret: t.Secret},
	}
}

func (t *task) subscription() map[string]*rmq.FilterExpression {
	filter := rmq.SUB_ALL
	if t.Filter != "" {
		filter = rmq.NewFilterExpression(t.Filter)
	}
	if t.SQL != "" {
		filter = rmq.NewFilterExpressionWithType(t.SQL, rmq.SQL92)
	}
	return map[string]*rmq.FilterExpression{t.Topic: filter}
}

func (t *task) end() time.Time {
	return time.Now().Add(time.Duration(t.Seconds) * time.Second)
}

func (t *task) message(one outgoing) *rmq.Message {
	message := &rmq.Message{Topic: t.Topic, Body: []byte(one.Body)}
	if one.Tag != "" {
		message.SetTag(one.Tag)
	}
	message.SetKeys(one.Keys...)
	for name, value := range one.Properties {
		message.AddProperty(name, value)
	}
	if one.MessageGroup != "" {
		message.SetMessageGroup(one.MessageGroup)
	}
	if one.DeliverAtS != 0 {
		message.SetDelayTimestamp(time.Unix(one.DeliverAtS, 0))
	}
	return message
}

func send(t *task) (any, error) {
	producer, err := rmq.NewProducer(t.config(), rmq.WithTopics(t.Topic))
	if err != nil {
		return nil, err
	}
	if err := producer.Start(); err != nil {
		return nil, err
	}
	sent := []map[string]any{}
	for _, one := range t.Messages {
		receipts, err := producer.Send(context.Background(), t.message(one))
		if err != nil {
			return nil, err
		}
		result := map[string]any{"id": receipts[0].MessageID, "offset": receipts[0].Offset}
		if one.Recall {
			recalled, err := producer.Recall(context.Background(), t.Topic, receipts[0].RecallHandle)
			if err != nil {
				return nil, err
			}
			result["recalled"] = recalled
		}
		sent = append(sent, result)
	}
	return map[string]any{"sent": sent}, producer.GracefulStop()
}

// transactions begins one per message and ends it as the message says; it answers checks meanwhile.
func transactions(t *task) (any, error) {
	found := make(chan view, 100)
	checker := &rmq.TransactionChecker{Check: func(message *rmq.MessageView) rmq.TransactionResolution {
		seen := viewOf(message)
		found <- seen
		if t.Answers[seen.Body] {
			return rmq.COMMIT
		}
		return rmq.ROLLBACK
	}}
	producer, err := rmq.NewProducer(t.config(), rmq.WithTopics(t.Topic), rmq.WithTransactionChecker(checker))
	if err != nil {
		return nil, err
	}
	if err := producer.Start(); err != nil {
		return nil, err
	}
	sent, checked := []map[string]any{}, []map[string]any{}
	for _, one := range t.Messages {
		transaction := producer.BeginTransaction()
		receipts, err := producer.SendWithTransaction(context.Background(), t.message(one), transaction)
		if err != nil {
			return nil, err
		}
		sent = append(sent, map[string]any{"id": receipts[0].MessageID})
		switch one.End {
		case "commit":
			err = transaction.Commit()
		case "rollback":
			err = transaction.RollBack()
		}
		if err != nil {
			return nil, err
		}
	}
	deadline := time.After(time.Duration(t.Seconds) * time.Second)
	for len(checked) < t.Checks {
		select {
		case one := <-found:
			checked = append(checked, map[string]any{"body": one.Body, "id": one.ID})
		case <-deadline:
			return nil, fmt.Errorf("%d of %d checks", len(checked), t.Checks)
		}
	}
	if t.Checks > 0 { // without checks it just dies
		time.Sleep(time.Second) // the answers to the checks leave
		err = producer.GracefulStop()
	}
	return map[string]any{"checked": checked, "sent": sent}, err
}

func simpleConsumer(t *task, await time.Duration) (rmq.SimpleConsumer, error) {
	consumer, err := rmq.NewSimpleConsumer(t.config(), rmq.WithSimpleAwaitDuration(await),
		rmq.WithSimpleSubscriptionExpressions(t.subscription()))
	if err != nil {
		return nil, err
	}
	return consumer, consumer.Start()
}

// isEmpty says whether a receive call failed because there was no message.
func isEmpty(err error) bool {
	refused, ok := rmq.AsErrRpcStatus(err)
	return ok && refused.GetCode() == int32(v2.Code_MESSAGE_NOT_FOUND)
}

func simple(t *task) (any, error) {
	consumer, err := simpleConsumer(t, 2*time.Second)
	if err != nil {
		return nil, err
	}
	received, invisible := []view{}, time.Duration(t.InvisibleS)*time.Second
	for end := t.end(); len(received) < t.Count && time.Now().Before(end); {
		messages, err := consumer.Receive(context.Background(), 16, invisible)
		if err != nil && !isEmpty(err) {
			return nil, err
		}
		for _, message := range messages {
			received = append(received, viewOf(message))
			if t.GiveBack && message.GetDeliveryAttempt() == 1 {
				err = consumer.ChangeInvisibleDuration(message, 0)
			} else if t.Ack == nil || *t.Ack {
				err = consumer.Ack(context.Background(), message)
			}
			if err != nil && !isEmpty(err) {
				return nil, err
			}
		}
	}
	return map[string]any{"received": received}, consumer.GracefulStop()
}

func push(t *task) (any, error) {
	var guard sync.Mutex
	received := []view{}
	listener := &rmq.FuncMessageListener{Consume: func(message *rmq.MessageView) rmq.ConsumerResult {
		guard.Lock()
		defer guard.Unlock()
		seen := viewOf(message)
		received = append(received, seen)
		if t.Fail[seen.Body] > 0 {
			t.Fail[seen.Body]--
			return rmq.FAILURE
		}
		return rmq.SUCCESS
	}}
	consumer, err := rmq.NewPushConsumer(t.config(), rmq.WithPushAwaitDuration(2*time.Second),
		rmq.WithPushSubscriptionExpressions(t.subscription()), rmq.WithPushMessageListener(listener))
	if err != nil {
		return nil, err
	}
	if err := consumer.Start(); err != nil {
		return nil, err
	}
	count := func() int {
		guard.Lock()
		defer guard.Unlock()
		return len(received)
	}
	for end := t.end(); count() < t.Count && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
	}
	time.Sleep(time.Second) // the last acks leave
	err = consumer.GracefulStop()
	guard.Lock()
	defer guard.Unlock()
	return map[string]any{"received": received}, err
}

func say(event map[string]any) {
	line, _ := json.Marshal(event)
	os.Stdout.Write(append(line, '\n'))
}

// ended returns a channel that is closed when the standard input ends.
func ended() <-chan struct{} {
	over := make(chan struct{})
	go func() {
		io.Copy(io.Discard, bufio.NewReader(os.Stdin))
		close(over)
	}()
	return over
}

func isOver(over <-chan struct{}, pause time.Duration) bool {
	select {
	case <-over:
		return true
	case <-time.After(pause):
		return false
	}
}

// sendOn sends numbered messages until the standard input ends, and prints the outcome of each.
func sendOn(t *task) (any, error) {
	over := ended()
	producer, err := rmq.NewProducer(t.config(), rmq.WithTopics(t.Topic))
	if err != nil {
		return nil, err
	}
	if err := producer.Start(); err != nil {
		return nil, err
	}
	for number := 1; !isOver(over, time.Duration(t.PauseS*float64(time.Second))); number++ {
		body := fmt.Sprint(number)
		message := &rmq.Message{Topic: t.Topic, Body: []byte(body)}
		if _, err := producer.Send(context.Background(), message); err != nil {
			say(map[string]any{"failed": body, "error": err.Error()})
		} else {
			say(map[string]any{"sent": body})
		}
	}
	return map[string]any{}, nil
}

// consumeOn receives and acknowledges until the standard input ends, and prints each event.
func consumeOn(t *task) (any, error) {
	over := ended()
	consumer, err := simpleConsumer(t, time.Second)
	if err != nil {
		return nil, err
	}
	invisible := time.Duration(t.InvisibleS) * time.Second
	for !isOver(over, 0) {
		messages, err := consumer.Receive(context.Background(), 16, invisible)
		if err != nil && !isEmpty(err) {
			say(map[string]any{"error": err.Error()})
			isOver(over, 100*time.Millisecond)
		}
		for _, message := range messages {
			body := string(message.GetBody())
			say(map[string]any{"received": body, "attempt": message.GetDeliveryAttempt()})
			if err := consumer.Ack(context.Background(), message); err != nil {
				say(map[string]any{"unsure": body, "error": err.Error()})
			} else {
				say(map[string]any{"acknowledged": body})
			}
		}
	}
	return map[string]any{}, nil
}

// refusedAcks makes a refused acknowledgement an error: Ack of a simple consumer returns nil for it.
func refusedAcks(
	ctx context.Context, method string, request, reply any, connection *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	if err := invoke(ctx, method, request, reply, connection, options...); err != nil {
		return err
	}
	answer, ok := reply.(*v2.AckMessageResponse)
	if code := answer.GetStatus().GetCode(); ok && code != v2.Code_OK {
		return &rmq.ErrRpcStatus{Code: int32(code), Message: answer.GetStatus().GetMessage()}
	}
	return nil
}

func run() (any, error) {
	connect, interceptor := rmq.NewRpcClient, grpc.WithChainUnaryInterceptor(refusedAcks)
	rmq.NewRpcClient = func(target string, options ...rmq.RpcClientOption) (rmq.RpcClient, error) {
		option := rmq.WithRpcClientConnOption(rmq.WithDialOptions(interceptor))
		return connect(target, append(options, option)...)
	}
	t := &task{}
	if err := json.Unmarshal([]byte(os.Args[1]), t); err != nil {
		return nil, err
	}
	operations := map[string]func(*task) (any, error){
		"send": send, "transactions": transactions, "simple": simple, "push": push,
		"send_on": sendOn, "consume_on": consumeOn,
	}
	return operations[t.Op](t)
}

func main() {
	result, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	line, _ := json.Marshal(result)
	fmt.Println(string(line))
	os.Exit(0)
}
