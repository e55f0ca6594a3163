// Send, receive and acknowledge with a plain gRPC stub: no client library of RocketMQ or BatonMQ.
//
//	baton up --data-dir /tmp/baton --gateway         in another terminal
//	baton topic create orders
//	cd examples/stubs/go && ./generate.sh && go run . 127.0.0.1:8081
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "baton.example/stub/rocketmq"
)

var (
	topic = &pb.Resource{Name: "orders"}
	group = &pb.Resource{Name: "go-stubs"}
)

// check ends the program if a call failed, or was answered with another code than OK.
func check(call string, err error, status *pb.Status) {
	if err != nil {
		log.Fatalf("%s: %v", call, err)
	}
	if status.GetCode() != pb.Code_OK {
		log.Fatalf("%s: %v", call, status)
	}
}

func receive(ctx context.Context, gateway pb.MessagingServiceClient) []*pb.Message {
	stream, err := gateway.ReceiveMessage(ctx, &pb.ReceiveMessageRequest{
		Group: group, MessageQueue: &pb.MessageQueue{Topic: topic}, BatchSize: 16,
		FilterExpression:   &pb.FilterExpression{Type: pb.FilterType_TAG, Expression: "*"},
		InvisibleDuration:  durationpb.New(30 * time.Second),
		LongPollingTimeout: durationpb.New(15 * time.Second),
	})
	if err != nil {
		log.Fatal(err)
	}
	var messages []*pb.Message
	for {
		frame, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return messages
		} else if err != nil {
			log.Fatal(err)
		}
		if message := frame.GetMessage(); message != nil {
			messages = append(messages, message)
		}
	}
}

func main() {
	connection, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	gateway := pb.NewMessagingServiceClient(connection)

	// Every call names its client, and has a deadline.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "x-mq-client-id", "stub@"+rand.Text(), "x-mq-language", "GOLANG")

	body := "paid " + rand.Text()
	properties := &pb.SystemProperties{MessageId: rand.Text(), BodyEncoding: pb.Encoding_IDENTITY}
	message := &pb.Message{Topic: topic, Body: []byte(body), SystemProperties: properties}
	sent, err := gateway.SendMessage(ctx, &pb.SendMessageRequest{Messages: []*pb.Message{message}})
	check("SendMessage", err, sent.GetStatus())

	for found := false; !found; {
		messages := receive(ctx, gateway)
		if len(messages) == 0 {
			log.Fatal("no message arrived")
		}
		request := &pb.AckMessageRequest{Group: group, Topic: topic}
		for _, one := range messages {
			found = found || string(one.GetBody()) == body
			request.Entries = append(request.Entries, &pb.AckMessageEntry{
				MessageId:     one.GetSystemProperties().GetMessageId(),
				ReceiptHandle: one.GetSystemProperties().GetReceiptHandle(),
			})
		}
		acked, err := gateway.AckMessage(ctx, request) // answered when it is durable
		check("AckMessage", err, acked.GetStatus())
	}
	fmt.Println("sent, received and acknowledged:", body)
}
