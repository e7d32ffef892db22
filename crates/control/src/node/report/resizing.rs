//! The condition `Resizing` of the layers below a claim: whether a layer is still growing, what holds it, and since
//! when that growth has been wanted.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use trellis_api::kinds::conditions::Says;
use trellis_api::{Bytes, Hold};

use crate::stored::StoredVolume;

/// What is asked of the layers of a volume.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// When the growth to the present goal began.
    began: Option<MicroTime>,
    /// A growth that cannot be granted now, so that no goal below the volume was raised.
    refused: Option<Refused>,
}

#[derive(Clone, Debug)]
struct Refused {
    reason: &'static str,
    message: String,
}

impl Asked {
    /// What is asked of the layers of a volume.
    pub fn of(stored: &StoredVolume) -> Asked {
        let Some(volume) = stored.volume.as_ref() else {
            return Asked::default();
        };
        let began = volume.spec.growth.as_ref().map(|growth| growth.at.clone());
        let is_refused = stored.granted() < Some(volume.spec.capacity);
        let status = volume.status.as_ref().filter(|_| is_refused);
        let hold = status.and_then(|status| status.hold.clone());
        Asked {
            refused: hold.map(|hold| Refused {
                reason: hold.reason.code(),
                message: hold.message,
            }),
            began,
        }
    }

    /// What a layer of `size` reports if it should have `goal` and `hold` keeps it from that.
    pub fn says<'a>(&'a self, size: Bytes, goal: Bytes, hold: Option<&'a Hold>) -> Says<'a> {
        let kind = "Resizing";
        let began = self.began.as_ref();
        let is_true = size < goal;
        if !is_true && let Some(refused) = &self.refused {
            return Says {
                kind,
                is_true: true,
                reason: refused.reason,
                message: &refused.message,
                began,
            };
        }
        let (reason, message) = match hold.filter(|_| is_true) {
            Some(hold) => (hold.reason.code(), hold.message.as_str()),
            None if is_true => ("Growing", ""),
            None => ("Reached", ""),
        };
        Says {
            kind,
            is_true,
            reason,
            message,
            began,
        }
    }
}
