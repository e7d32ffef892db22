//! Looks at the replicas of a volume without taking it over, for a person who has to decide which of them to continue
//! with.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::Duration;

use uuid::Uuid;

use super::dial::dial;
use super::link::{Link, LinkError};
use super::{Address, Credentials, Failure};
use crate::proto::{Answer, Body, Envelope, Promise, ReplicaId, Request, Surveyed};
use crate::wire::Arrival;

/// Why a replica could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum SurveyFault {
    /// Nobody listens there.
    #[error("the copy is not reached at {address}; start it, or bring its disk back")]
    Unreachable {
        /// Where it was looked for.
        address: Address,
        /// What the operating system said.
        kind: io::ErrorKind,
    },
    /// Somebody listens there, and there is no connection all the same.
    #[error("there is no connection to the copy at {address}: {why}")]
    NotConnected {
        /// Where it was looked for.
        address: Address,
        /// Why.
        why: Failure,
    },
    /// It did not answer in time.
    #[error("the copy at {address} did not answer in time")]
    Silent {
        /// Where it was asked.
        address: Address,
    },
    /// It hung up: it belongs to another volume, or to a version that does not know the question.
    #[error("the copy at {address} is of another volume, or too old to be asked what it holds")]
    Refused {
        /// Where it was asked.
        address: Address,
    },
}

/// Asks every replica what it has. This changes nothing and does not disturb the coordinator. A replica may take
/// `patience` to answer; all are asked at the same time. Replicas on other nodes are asked with these credentials.
pub async fn survey(
    volume: Uuid,
    addresses: BTreeMap<ReplicaId, Address>,
    credentials: Option<&Credentials>,
    patience: Duration,
) -> BTreeMap<ReplicaId, Result<Surveyed, SurveyFault>> {
    let mut asked = tokio::task::JoinSet::new();
    for (replica, address) in addresses {
        let credentials = credentials.cloned();
        asked.spawn(async move {
            let asking = ask(volume, replica, &address, credentials.as_ref());
            let answer = tokio::time::timeout(patience, asking).await;
            (
                replica,
                answer.unwrap_or(Err(SurveyFault::Silent { address })),
            )
        });
    }
    let mut found = BTreeMap::new();
    while let Some(answer) = asked.join_next().await {
        // A task that panicked has said so.
        found.extend(answer);
    }
    found
}

async fn ask(
    volume: Uuid,
    replica: ReplicaId,
    address: &Address,
    credentials: Option<&Credentials>,
) -> Result<Surveyed, SurveyFault> {
    let unreachable = |why| {
        let address = address.clone();
        match why {
            Failure::Connect(kind) => SurveyFault::Unreachable { address, kind },
            why => SurveyFault::NotConnected { address, why },
        }
    };
    let refused = || SurveyFault::Refused {
        address: address.clone(),
    };
    let dialled = dial(address, credentials).await.map_err(unreachable)?;
    let mut link = Link::new(dialled.stream);
    let question = Envelope {
        volume,
        replica,
        promise: Promise::default(),
        size_version: 0,
        index: 0,
        body: Body::Request(Request::Survey),
    };
    let mut answer = None;
    let asked: Result<(), LinkError> = async {
        link.send(&question)?;
        poll_fn(|context| {
            link.poll_flush(context)?;
            let sink = |arrival| {
                if let Arrival::Message(envelope) = arrival
                    && envelope.volume == volume
                    && envelope.replica == replica
                    && let Body::Answer(Answer::Surveyed(surveyed)) = envelope.body
                {
                    answer = Some(*surveyed);
                }
            };
            match link.poll_receive(context, sink) {
                _ if answer.is_some() => Poll::Ready(Ok(())),
                Poll::Ready(Ok(())) => {
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
                other => other,
            }
        })
        .await
    }
    .await;
    if let Err(error) = asked {
        tracing::debug!(%replica, "{error}");
    }
    answer.ok_or_else(refused)
}
