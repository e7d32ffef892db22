//! Text in the full-feature phase: SendTargets, and a new segment length.

use bytes::Bytes;

use super::Line;
use super::full::Full;
use crate::error::{Breach, Disconnect};
use crate::login::{BadText, Reply, TextBuffer, TextWriter};
use crate::pdu::header::{TextRequest, TextResponse};
use crate::pdu::{CONTINUE, FINAL, Pdu, TAG_NONE, opcode, reject};
use crate::portal::PORTAL_GROUP;

/// A text exchange in progress.
#[derive(Debug, Default)]
pub struct TextExchange {
    incoming: TextBuffer,
    /// What did not fit into the last response.
    rest: Bytes,
    /// Counts exchanges, so that a continuation cannot be taken for another's.
    tag: u32,
}

impl Full {
    pub(super) fn text(&mut self, line: &mut Line, pdu: &Pdu) -> Result<(), Disconnect> {
        let request = *TextRequest::from_wire(&pdu.header);
        let continued = request.ttt.get() != TAG_NONE;
        if continued && request.ttt.get() != self.text.tag {
            self.reject(line, reject::PROTOCOL, &pdu.header);
            return Ok(());
        }
        if !continued {
            self.text.rest = Bytes::new();
        }
        if self.text.incoming.push(&pdu.data).is_err() {
            self.reject(line, reject::PROTOCOL, &pdu.header);
            return Err(Disconnect::Protocol(Breach::TextTooLong));
        }
        if request.flags & CONTINUE != 0 {
            self.text.tag = next_tag(self.text.tag);
            self.send_text(line, &request, Bytes::new(), 0);
            return Ok(());
        }
        if self.text.rest.is_empty() {
            match self.text.incoming.take() {
                Ok(pairs) => self.text.rest = self.answer(&pairs),
                Err(BadText) => {
                    self.reject(line, reject::PROTOCOL, &pdu.header);
                    return Ok(());
                }
            }
        }
        let room = usize::try_from(self.params.send_segment_bytes_max).unwrap_or(usize::MAX);
        let part = self.text.rest.split_to(self.text.rest.len().min(room));
        if self.text.rest.is_empty() {
            self.text.tag = TAG_NONE;
            self.send_text(line, &request, part, FINAL);
        } else {
            self.text.tag = next_tag(self.text.tag);
            self.send_text(line, &request, part, CONTINUE);
        }
        Ok(())
    }

    fn answer(&mut self, pairs: &[(String, String)]) -> Bytes {
        let mut reply = TextWriter::default();
        for (key, value) in pairs {
            match key.as_str() {
                "SendTargets" => self.send_targets(value, &mut reply),
                "MaxRecvDataSegmentLength" => {
                    if let Reply::Value(answer) = self.params.negotiate(key, value) {
                        reply.pair(key, &answer);
                    }
                }
                "InitiatorAlias" => {}
                // Everything else is agreed at login or not at all.
                _ => reply.pair(key, "Reject"),
            }
        }
        reply.finish()
    }

    fn send_targets(&self, value: &str, reply: &mut TextWriter) {
        let initiator = &self.seat.nexus.port.name;
        let address = format!("{},{PORTAL_GROUP}", self.local);
        let own = self.seat.target.as_ref().map(|target| target.name());
        for name in self.seat.target_names(initiator) {
            let named = match (value, own) {
                ("All", None) => true,
                ("" | "All", Some(own)) => name == own,
                (wanted, _) => name == wanted,
            };
            if named {
                reply.pair("TargetName", &name);
                reply.pair("TargetAddress", &address);
            }
        }
    }

    fn send_text(&mut self, line: &mut Line, request: &TextRequest, text: Bytes, flags: u8) {
        let numbers = self.numbers(line);
        let header = TextResponse {
            opcode: opcode::TEXT_RESPONSE,
            flags,
            lun: request.lun,
            itt: request.itt,
            ttt: if flags & FINAL != 0 {
                TAG_NONE.into()
            } else {
                self.text.tag.into()
            },
            stat_sn: numbers.stat_sn.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            ..TextResponse::default()
        };
        line.out.push(zerocopy::transmute!(header), &[text]);
    }
}

fn next_tag(tag: u32) -> u32 {
    tag.wrapping_add(1) % TAG_NONE
}
