//! The official Rust client as a program: takes one task as JSON, prints the result as JSON.
//!
//! The crate has no push consumer, no change of an invisible time, no recall, no namespaces and no
//! TLS: tasks that need them end with an error.
use std::collections::HashMap;
use std::error::Error;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::error::ClientError;
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Value};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

type Outcome = Result<Value, Box<dyn Error>>;

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_string()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn seconds(value: &Value) -> Duration {
    Duration::from_secs_f64(value.as_f64().unwrap_or_default())
}

fn client_option(task: &Value) -> ClientOption {
    let mut option = ClientOption::default();
    option.set_access_url(text(&task["endpoints"]));
    option.set_enable_tls(task["tls"] == true);
    option.set_long_polling_timeout(Duration::from_secs(2));
    if task["access_key"].is_string() {
        option.set_access_key(text(&task["access_key"]));
        option.set_secret_key(text(&task["secret"]));
    }
    option
}

fn producer_option(task: &Value) -> ProducerOption {
    let mut option = ProducerOption::default();
    option.set_topics(vec![text(&task["topic"])]);
    option
}

fn message(task: &Value, one: &Value) -> MessageBuilder {
    let mut message = MessageBuilder::builder()
        .set_topic(text(&task["topic"]))
        .set_body(text(&one["body"]).into_bytes());
    if one["tag"].is_string() {
        message = message.set_tag(text(&one["tag"]));
    }
    if one["keys"].is_array() {
        message = message.set_keys(list(&one["keys"]).iter().map(text).collect());
    }
    if let Some(properties) = one["properties"].as_object() {
        let pairs: HashMap<String, String> = properties
            .iter()
            .map(|(name, value)| (name.clone(), text(value)))
            .collect();
        message = message.set_properties(pairs);
    }
    if one["message_group"].is_string() {
        message = message.set_message_group(text(&one["message_group"]));
    }
    if let Some(deliver_at_s) = one["deliver_at_s"].as_i64() {
        message = message.set_delivery_timestamp(deliver_at_s);
    }
    message
}

async fn send(task: &Value) -> Outcome {
    let mut producer = Producer::new(producer_option(task), client_option(task))?;
    producer.start().await?;
    let mut sent = vec![];
    for one in list(&task["messages"]) {
        if one["recall"] == true {
            return Err("the crate has no recall".into());
        }
        let receipt = producer.send(message(task, one).build()?).await?;
        sent.push(json!({"id": receipt.message_id()}));
    }
    producer.shutdown().await?;
    Ok(json!({"sent": sent}))
}

/// Begins a transaction per message and ends it as the message says; answers checks meanwhile.
async fn transactions(task: &Value) -> Outcome {
    let checked = Arc::new(Mutex::new(vec![]));
    let (seen, answers) = (checked.clone(), task["answers"].clone());
    let checker = move |_: String, message: MessageView| {
        let body = String::from_utf8_lossy(message.body()).to_string();
        seen.lock()
            .unwrap()
            .push(json!({"body": body, "id": message.message_id()}));
        match answers[&body] == true {
            true => TransactionResolution::COMMIT,
            false => TransactionResolution::ROLLBACK,
        }
    };
    let mut producer = Producer::new_transaction_producer(
        producer_option(task),
        client_option(task),
        Box::new(checker),
    )?;
    producer.start().await?;
    let mut sent = vec![];
    for one in list(&task["messages"]) {
        let message = message(task, one).enable_transaction().build()?;
        let transaction = producer.send_transaction_message(message).await?;
        sent.push(json!({"id": transaction.message_id()}));
        match one["end"].as_str() {
            Some("commit") => transaction.commit().await?,
            Some("rollback") => transaction.rollback().await?,
            _ => {}
        }
    }
    let checks = task["checks"].as_u64().unwrap_or_default() as usize;
    let end = Instant::now() + seconds(&task["seconds"]);
    while checked.lock().unwrap().len() < checks && Instant::now() < end {
        sleep(Duration::from_millis(50)).await;
    }
    if checks > 0 {
        sleep(Duration::from_secs(1)).await; // the answers to the checks leave
        producer.shutdown().await?; // without checks it just dies
    }
    let checked = checked.lock().unwrap().clone();
    Ok(json!({"checked": checked, "sent": sent}))
}

fn view(message: &MessageView) -> Value {
    let mut keys = message.keys().to_vec();
    keys.sort();
    json!({
        "body": String::from_utf8_lossy(message.body()),
        "id": message.message_id(),
        "tag": message.tag().unwrap_or_default(),
        "keys": keys,
        "message_group": message.message_group().unwrap_or_default(),
        "properties": message.properties(),
        "attempt": message.delivery_attempt(),
        "at_s": UNIX_EPOCH.elapsed().unwrap().as_secs_f64(),
    })
}

async fn consumer(task: &Value) -> Result<SimpleConsumer, ClientError> {
    let mut option = SimpleConsumerOption::default();
    option.set_topics(vec![text(&task["topic"])]);
    option.set_consumer_group(text(&task["group"]));
    let mut consumer = SimpleConsumer::new(option, client_option(task))?;
    consumer.start().await?;
    Ok(consumer)
}

/// Receives messages and acknowledges those that do not fail.
async fn simple(task: &Value) -> Outcome {
    if task["give_back"] == true {
        return Err("the crate does not change invisible times".into());
    }
    let filter = match (task["filter"].as_str(), task["sql"].as_str()) {
        (_, Some(sql)) => FilterExpression::new(FilterType::Sql, sql),
        (tags, None) => FilterExpression::new(FilterType::Tag, tags.unwrap_or("*")),
    };
    let consumer = consumer(task).await?;
    let mut failures = task["fail"].as_object().cloned().unwrap_or_default();
    let count = task["count"].as_u64().unwrap() as usize;
    let (topic, invisible) = (text(&task["topic"]), seconds(&task["invisible_s"]));
    let end = Instant::now() + seconds(&task["seconds"]);
    let mut received = vec![];
    while received.len() < count && Instant::now() < end {
        // A long poll without a message may end by the deadline of its call.
        let messages = consumer.receive_with(&topic, &filter, 16, invisible).await;
        for message in messages.unwrap_or_default() {
            let seen = view(&message);
            let left = failures
                .get(&text(&seen["body"]))
                .and_then(Value::as_i64)
                .unwrap_or(0);
            if left > 0 {
                failures.insert(text(&seen["body"]), json!(left - 1));
            } else if task["ack"] != false {
                consumer.ack(&message).await?;
            }
            received.push(seen);
        }
    }
    consumer.shutdown().await?;
    Ok(json!({"received": received}))
}

/// Returns a value that becomes true when the standard input ends.
fn ended() -> watch::Receiver<bool> {
    let (over, is_over) = watch::channel(false);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut vec![]);
        let _ = over.send(true);
    });
    is_over
}

/// Sends numbered messages until the standard input ends; prints the outcome of each.
async fn send_on(task: &Value) -> Outcome {
    let mut over = ended();
    let mut producer = Producer::new(producer_option(task), client_option(task))?;
    producer.start().await?;
    let mut number = 0;
    while timeout(seconds(&task["pause_s"]), over.changed())
        .await
        .is_err()
    {
        number += 1;
        let body = number.to_string();
        match producer
            .send(message(task, &json!({"body": body})).build()?)
            .await
        {
            Ok(_) => println!("{}", json!({"sent": body})),
            Err(error) => println!("{}", json!({"failed": body, "error": error.to_string()})),
        }
    }
    Ok(json!({}))
}

/// Receives and acknowledges until the standard input ends; prints each event as it happens.
async fn consume_on(task: &Value) -> Outcome {
    let over = ended();
    let consumer = consumer(task).await?;
    let all = FilterExpression::new(FilterType::Tag, "*");
    let (topic, invisible) = (text(&task["topic"]), seconds(&task["invisible_s"]));
    while !*over.borrow() {
        let messages = match consumer.receive_with(&topic, &all, 16, invisible).await {
            Ok(messages) => messages,
            Err(error) => {
                println!("{}", json!({"error": error.to_string()}));
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        for message in messages {
            let body = String::from_utf8_lossy(message.body()).to_string();
            println!(
                "{}",
                json!({"received": body, "attempt": message.delivery_attempt()})
            );
            match consumer.ack(&message).await {
                Ok(()) => println!("{}", json!({"acknowledged": body})),
                Err(error) => println!("{}", json!({"unsure": body, "error": error.to_string()})),
            }
        }
    }
    Ok(json!({}))
}

#[tokio::main]
async fn main() {
    let task: Value = serde_json::from_str(&std::env::args().nth(1).unwrap()).unwrap();
    let outcome = match task["op"].as_str() {
        Some("send") => send(&task).await,
        Some("simple") => simple(&task).await,
        Some("transactions") => transactions(&task).await,
        Some("send_on") => send_on(&task).await,
        Some("consume_on") => consume_on(&task).await,
        other => Err(format!("the crate can't do {other:?}").into()),
    };
    let failed = outcome.is_err();
    match outcome {
        Ok(result) => println!("{result}"),
        Err(error) => eprintln!("{error:?}"),
    }
    std::process::exit(failed as i32);
}
