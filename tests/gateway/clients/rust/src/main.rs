//! The official Rust client as a program: takes one task as JSON, prints the result as JSON.
use std::collections::HashMap;
use std::time::{Duration, Instant};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::MessageBuilder;
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Value};

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_string()
}

fn client_option(task: &Value) -> ClientOption {
    let mut option = ClientOption::default();
    option.set_access_url(text(&task["endpoints"]));
    option.set_enable_tls(false);
    option.set_long_polling_timeout(Duration::from_secs(2));
    option
}

async fn send(task: &Value) -> Value {
    let topic = text(&task["topic"]);
    let mut option = ProducerOption::default();
    option.set_topics(vec![topic.clone()]);
    let mut producer = Producer::new(option, client_option(task)).unwrap();
    producer.start().await.unwrap();
    let mut sent = vec![];
    for one in task["messages"].as_array().unwrap() {
        let mut message = MessageBuilder::builder()
            .set_topic(topic.clone())
            .set_body(text(&one["body"]).into_bytes());
        if one["tag"].is_string() {
            message = message.set_tag(text(&one["tag"]));
        }
        if let Some(keys) = one["keys"].as_array() {
            message = message.set_keys(keys.iter().map(text).collect());
        }
        if let Some(properties) = one["properties"].as_object() {
            let pairs: HashMap<String, String> =
                properties.iter().map(|(name, value)| (name.clone(), text(value))).collect();
            message = message.set_properties(pairs);
        }
        if one["message_group"].is_string() {
            message = message.set_message_group(text(&one["message_group"]));
        }
        let receipt = producer.send(message.build().unwrap()).await.unwrap();
        sent.push(json!({"id": receipt.message_id()}));
    }
    let _ = producer.shutdown().await;
    json!({"sent": sent})
}

async fn simple(task: &Value) -> Value {
    let topic = text(&task["topic"]);
    let mut option = SimpleConsumerOption::default();
    option.set_topics(vec![topic.clone()]);
    option.set_consumer_group(text(&task["group"]));
    let mut consumer = SimpleConsumer::new(option, client_option(task)).unwrap();
    consumer.start().await.unwrap();
    let end = Instant::now() + Duration::from_secs(task["seconds"].as_u64().unwrap());
    let count = task["count"].as_u64().unwrap() as usize;
    let mut received = vec![];
    while received.len() < count && Instant::now() < end {
        let all = FilterExpression::new(FilterType::Tag, "*");
        for message in consumer.receive(topic.clone(), &all).await.unwrap_or_default() {
            let mut keys = message.keys().to_vec();
            keys.sort();
            received.push(json!({
                "body": String::from_utf8_lossy(message.body()),
                "id": message.message_id(),
                "tag": message.tag().unwrap_or_default(),
                "keys": keys,
                "message_group": message.message_group().unwrap_or_default(),
                "properties": message.properties(),
                "attempt": message.delivery_attempt(),
            }));
            consumer.ack(&message).await.unwrap();
        }
    }
    let _ = consumer.shutdown().await;
    json!({"received": received})
}

#[tokio::main]
async fn main() {
    let task: Value = serde_json::from_str(&std::env::args().nth(1).unwrap()).unwrap();
    let result = match task["op"].as_str() {
        Some("send") => send(&task).await,
        _ => simple(&task).await,
    };
    println!("{result}");
    std::process::exit(0);
}
