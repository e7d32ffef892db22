//! From a socket to a connection on which both sides know who the other is and what it speaks.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::net::TcpStream;

use super::credentials::{Credentials, Keys};
use super::verify::{Expected, Verifier};
use super::{NodeName, Refusal, Side, TlsStream};
use crate::drive::Failure;
use crate::drive::link::LinkError;
use crate::wire::{
    self, Arrival, HEADER_BYTES, KNOWS_ALL, KNOWS_NEEDED, Objection, Sum, WireError,
};

/// The longest first frame. A later version may have more to say than this one.
const FIRST_FRAME_BYTES_MAX: usize = 1 << 10;

/// A connection to a peer that has shown who it is.
pub(in crate::drive) struct Entered {
    pub(in crate::drive) stream: TlsStream,
    /// The node at the other end.
    pub(in crate::drive) node: NodeName,
    /// What it knows, as bits of kind 6.
    pub(in crate::drive) knows: u32,
}

/// What counts now, read where it may block.
async fn current(credentials: &Credentials) -> Result<Option<Arc<Keys>>, LinkError> {
    let credentials = credentials.clone();
    tokio::task::spawn_blocking(move || credentials.current())
        .await
        .map_err(|error| LinkError::Io(error.into()))
}

/// Connects to a node.
pub(in crate::drive) async fn dial(
    at: SocketAddr,
    node: &NodeName,
    credentials: &Credentials,
) -> Result<Entered, Failure> {
    let connected = TcpStream::connect(at).await;
    let socket = connected.map_err(|error| Failure::Connect(error.kind()))?;
    let own = credentials.node();
    let failed = |error: LinkError| Failure::of(&error, Some(own), None);
    let keys = current(credentials).await.map_err(failed)?;
    let keys = keys.ok_or(Failure::NoCredentials)?;
    let expected = Expected::Only(node.clone());
    let verifier = Arc::new(Verifier::new(Arc::clone(&keys), expected));
    let stream = TlsStream::client(socket, &keys, Arc::clone(&verifier));
    let mut stream = stream.map_err(failed)?;
    match first(&mut stream).await {
        Ok(knows) => Ok(Entered {
            stream,
            node: node.clone(),
            knows,
        }),
        Err(error) => {
            tokio::spawn(stream.linger());
            Err(Failure::of(&error, Some(own), verifier.refusal()))
        }
    }
}

/// Accepts a node, if it is one of those that are allowed. Otherwise `refused` is told at once, and the peer a moment
/// later.
pub(in crate::drive) async fn enter(
    socket: TcpStream,
    credentials: &Credentials,
    allowed: Arc<BTreeSet<NodeName>>,
    refused: impl FnOnce(Side, Refusal),
) -> Option<Entered> {
    let Some(keys) = current(credentials).await.ok().flatten() else {
        // Without a certificate nothing can be said to the peer, who finds the connection closed.
        refused(Side::Here, Refusal::Unready);
        return None;
    };
    let verifier = Arc::new(Verifier::new(Arc::clone(&keys), Expected::OneOf(allowed)));
    let mut stream = TlsStream::server(socket, &keys, Arc::clone(&verifier)).ok()?;
    let error = match second(&mut stream).await {
        Ok(knows) => match verifier.peer() {
            Some(node) => {
                return Some(Entered {
                    stream,
                    node,
                    knows,
                });
            }
            // It would be a flaw of the verifier if nobody had been looked at.
            None => LinkError::Tls(rustls::Error::NoCertificatesPresented),
        },
        Err(error) => error,
    };
    let behind = Refusal::behind(&error, Some(keys.node()), verifier.refusal());
    let (side, refusal) = behind.unwrap_or((Side::There, Refusal::Left));
    refused(side, refusal);
    stream.linger().await;
    None
}

/// The side that speaks first. Says what the other one knows.
async fn first(stream: &mut TlsStream) -> Result<u32, LinkError> {
    stream.shake_hands().await?;
    stream.welcome();
    let mut hello = BytesMut::new();
    wire::encode_knows(KNOWS_ALL, &mut hello)?;
    // If that fails, the reason is among what has arrived.
    let sent = send(stream, &hello).await;
    let knows = hear(stream).await?;
    sent.map(|()| knows)
}

/// The side that answers. Says what the other one knows.
async fn second(stream: &mut TlsStream) -> Result<u32, LinkError> {
    stream.shake_hands().await?;
    stream.welcome();
    let knows = hear(stream).await?;
    let mut hello = BytesMut::new();
    wire::encode_knows(KNOWS_ALL, &mut hello)?;
    send(stream, &hello).await?;
    Ok(knows)
}

/// Hears what the peer knows. If it does not fit, the peer is told.
async fn hear(stream: &mut TlsStream) -> Result<u32, LinkError> {
    let (error, objection) = match frame(stream).await {
        Ok(Arrival::Knows(knows)) => match KNOWS_NEEDED & !knows {
            0 => return Ok(knows),
            missing => (
                LinkError::Lacks { missing },
                Objection::Features { missing },
            ),
        },
        Ok(Arrival::Objects(objection)) => return Err(LinkError::Objected(objection)),
        Ok(_) => return Err(WireError::Nonsense.into()),
        Err(LinkError::Wire(WireError::Version { theirs, ours })) => (
            LinkError::Wire(WireError::Version { theirs, ours }),
            Objection::Version { shown: theirs },
        ),
        Err(error) => return Err(error),
    };
    let mut last = BytesMut::new();
    wire::encode_objects(objection, &mut last)?;
    // Our own reason matters more than whether the peer hears it.
    let _ = send(stream, &last).await;
    Err(error)
}

/// Reads the first frame of a peer. Nothing may follow it before it is answered.
async fn frame(stream: &mut TlsStream) -> Result<Arrival, LinkError> {
    let mut bytes = BytesMut::new();
    loop {
        let read = poll_fn(|context| stream.poll_read(context, &mut bytes, FIRST_FRAME_BYTES_MAX));
        if read.await? == 0 {
            return Err(LinkError::Closed);
        }
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>().copied() else {
            continue;
        };
        let whole = HEADER_BYTES + wire::body_length(&header)?;
        if whole > FIRST_FRAME_BYTES_MAX || bytes.len() > whole {
            return Err(WireError::Nonsense.into());
        }
        if bytes.len() == whole {
            let body: Bytes = bytes.split_off(HEADER_BYTES).freeze();
            return Ok(wire::decode_any(&header, &body, Sum::Whole, &|_, _| None)?);
        }
    }
}

async fn send(stream: &mut TlsStream, mut bytes: &[u8]) -> Result<(), LinkError> {
    while !bytes.is_empty() {
        let sealed = poll_fn(|context| stream.poll_write(context, &[IoSlice::new(bytes)])).await?;
        bytes = &bytes[sealed..];
    }
    poll_fn(|context| stream.poll_flush(context)).await
}
