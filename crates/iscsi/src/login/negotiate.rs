//! The operational parameters, and how each is negotiated.

use crate::limits::{
    FIRST_BURST_BYTES_MAX, MAX_BURST_BYTES_MAX, OUTSTANDING_R2T_MAX, RECV_SEGMENT_BYTES_MAX,
    SEND_SEGMENT_BYTES_MAX,
};

/// What was agreed. The defaults are those of RFC 7143, section 13.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Params {
    /// Headers carry a CRC32C.
    pub header_digest: bool,
    /// Data segments carry a CRC32C.
    pub data_digest: bool,
    /// The longest data segment that the initiator takes.
    pub send_segment_bytes_max: u32,
    /// The longest burst.
    pub max_burst_bytes: u32,
    /// The most unsolicited data of one write.
    pub first_burst_bytes: u32,
    /// Data comes only when asked for (but for immediate data).
    pub initial_r2t: bool,
    /// Data may come in the command's PDU.
    pub immediate_data: bool,
    /// Bursts that may be asked for at the same time.
    pub outstanding_r2t_max: u32,
}

impl Default for Params {
    fn default() -> Self {
        Params {
            header_digest: false,
            data_digest: false,
            send_segment_bytes_max: 8192,
            max_burst_bytes: 256 * 1024,
            first_burst_bytes: 64 * 1024,
            initial_r2t: true,
            immediate_data: true,
            outstanding_r2t_max: 1,
        }
    }
}

/// What to answer to a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// This value.
    Value(String),
    /// Nothing: the key declares.
    Silent,
}

const SEGMENT_MIN: u32 = 512;
const LENGTH_MAX: u32 = 0x00ff_ffff;

impl Params {
    /// What we declare ourselves.
    pub fn declarations() -> [(&'static str, String); 1] {
        [(
            "MaxRecvDataSegmentLength",
            RECV_SEGMENT_BYTES_MAX.to_string(),
        )]
    }

    /// Take one key of the initiator into account and say what to answer.
    pub fn negotiate(&mut self, key: &str, value: &str) -> Reply {
        match key {
            "HeaderDigest" => digest(value, &mut self.header_digest),
            "DataDigest" => digest(value, &mut self.data_digest),
            "MaxRecvDataSegmentLength" => match number(value, SEGMENT_MIN, LENGTH_MAX) {
                Some(len) => {
                    self.send_segment_bytes_max = len.min(SEND_SEGMENT_BYTES_MAX);
                    Reply::Silent
                }
                None => rejected(),
            },
            "MaxBurstLength" => match number(value, SEGMENT_MIN, LENGTH_MAX) {
                Some(len) => {
                    self.max_burst_bytes = len.min(MAX_BURST_BYTES_MAX);
                    self.first_burst_bytes = self.first_burst_bytes.min(self.max_burst_bytes);
                    Reply::Value(self.max_burst_bytes.to_string())
                }
                None => rejected(),
            },
            "FirstBurstLength" => match number(value, SEGMENT_MIN, LENGTH_MAX) {
                Some(len) => {
                    self.first_burst_bytes =
                        len.min(FIRST_BURST_BYTES_MAX).min(self.max_burst_bytes);
                    Reply::Value(self.first_burst_bytes.to_string())
                }
                None => rejected(),
            },
            "InitialR2T" => either(value, false, &mut self.initial_r2t),
            "ImmediateData" => both(value, &mut self.immediate_data),
            "MaxOutstandingR2T" => match number(value, 1, 65535) {
                Some(count) => {
                    self.outstanding_r2t_max = count.min(OUTSTANDING_R2T_MAX);
                    Reply::Value(self.outstanding_r2t_max.to_string())
                }
                None => rejected(),
            },
            "MaxConnections" => fixed(number(value, 1, 65535), "1"),
            "ErrorRecoveryLevel" => fixed(number(value, 0, 2), "0"),
            // The larger wait and the smaller retention; we keep nothing of a session that is gone.
            "DefaultTime2Wait" => match number(value, 0, 3600) {
                Some(seconds) => Reply::Value(seconds.to_string()),
                None => rejected(),
            },
            "DefaultTime2Retain" => fixed(number(value, 0, 3600), "0"),
            "DataPDUInOrder" | "DataSequenceInOrder" => either(value, true, &mut true),
            "IFMarker" | "OFMarker" => Reply::Value("No".to_owned()),
            "IFMarkInt" | "OFMarkInt" => Reply::Value("Irrelevant".to_owned()),
            "TaskReporting" => Reply::Value("RFC3720".to_owned()),
            "iSCSIProtocolLevel" => fixed(number(value, 0, 31), "1"),
            "InitiatorAlias" | "InitiatorName" | "TargetName" | "SessionType" => Reply::Silent,
            _ => Reply::Value("NotUnderstood".to_owned()),
        }
    }
}

fn rejected() -> Reply {
    Reply::Value("Reject".to_owned())
}

fn number(value: &str, min: u32, max: u32) -> Option<u32> {
    let number = match value
        .strip_prefix("0x")
        .or_else(|| value.strip_prefix("0X"))
    {
        Some(digits) => u32::from_str_radix(digits, 16).ok()?,
        None => value.parse().ok()?,
    };
    (min..=max).contains(&number).then_some(number)
}

fn fixed(offered: Option<u32>, ours: &str) -> Reply {
    if offered.is_some() {
        Reply::Value(ours.to_owned())
    } else {
        rejected()
    }
}

/// The initiator's list is in the order of its preference.
fn digest(value: &str, on: &mut bool) -> Reply {
    match value
        .split(',')
        .find(|each| matches!(*each, "CRC32C" | "None"))
    {
        Some(choice) => {
            *on = choice == "CRC32C";
            Reply::Value(choice.to_owned())
        }
        None => rejected(),
    }
}

fn yes_no(value: &str) -> Option<bool> {
    match value {
        "Yes" => Some(true),
        "No" => Some(false),
        _ => None,
    }
}

fn answer(result: bool) -> Reply {
    Reply::Value(if result { "Yes" } else { "No" }.to_owned())
}

/// Yes if either side wants it.
fn either(value: &str, ours: bool, result: &mut bool) -> Reply {
    match yes_no(value) {
        Some(theirs) => {
            *result = theirs || ours;
            answer(*result)
        }
        None => rejected(),
    }
}

/// Yes if both sides can.
fn both(value: &str, result: &mut bool) -> Reply {
    match yes_no(value) {
        Some(theirs) => {
            *result = theirs;
            answer(theirs)
        }
        None => rejected(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn value(text: &str) -> Reply {
        Reply::Value(text.to_owned())
    }

    #[test]
    fn each_key_is_agreed_by_its_own_rule() {
        // Fails if a list is not taken in the initiator's order, a limit is exceeded, or nonsense is agreed to.
        let mut params = Params::default();
        assert_eq!(
            params.negotiate("HeaderDigest", "CRC32C,None"),
            value("CRC32C")
        );
        assert_eq!(params.negotiate("DataDigest", "None,CRC32C"), value("None"));
        assert_eq!(
            params.negotiate("MaxBurstLength", "16776192"),
            value("1048576")
        );
        assert_eq!(
            params.negotiate("FirstBurstLength", "65536"),
            value("65536")
        );
        assert_eq!(params.negotiate("InitialR2T", "No"), value("No"));
        assert_eq!(params.negotiate("ImmediateData", "Yes"), value("Yes"));
        assert_eq!(
            params.negotiate("MaxRecvDataSegmentLength", "262144"),
            Reply::Silent
        );
        assert_eq!(params.negotiate("MaxConnections", "8"), value("1"));
        assert_eq!(params.negotiate("ErrorRecoveryLevel", "2"), value("0"));
        assert_eq!(params.negotiate("MaxOutstandingR2T", "16"), value("4"));
        assert_eq!(params.negotiate("DataPDUInOrder", "No"), value("Yes"));
        assert_eq!(
            params.negotiate("X-org.example.key", "1"),
            value("NotUnderstood")
        );
        assert_eq!(params.negotiate("MaxBurstLength", "12"), value("Reject"));
        assert_eq!(params.negotiate("InitialR2T", "Perhaps"), value("Reject"));
        assert_eq!(params.negotiate("HeaderDigest", "MD5"), value("Reject"));
        assert!(params.header_digest && !params.data_digest && !params.initial_r2t);
        assert_eq!(params.send_segment_bytes_max, SEND_SEGMENT_BYTES_MAX);
    }
}
