//! Which objects a list, a watch or a deletion means.

mod field;
mod label;

use crate::kind::Kind;
use crate::status::Status;
use crate::store::memory::{ObjectPlace, Stored};
pub(crate) use field::FieldSelector;
pub(crate) use label::LabelSelector;

/// A label selector and a field selector; both must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selector {
    labels: LabelSelector,
    fields: FieldSelector,
}

impl Selector {
    pub(crate) fn parse(kind: &Kind, labels: &str, fields: &str) -> Result<Selector, Status> {
        let labels = LabelSelector::parse(labels).map_err(|error| {
            Status::bad_request(format!("unable to parse requirement: {error}"))
        })?;
        let fields =
            FieldSelector::parse(fields).map_err(|error| Status::bad_request(error.to_string()))?;
        fields.check(kind)?;
        Ok(Selector { labels, fields })
    }

    pub(crate) fn matches(&self, place: &ObjectPlace, stored: &Stored) -> bool {
        self.labels.matches(|key| stored.label(key)) && self.fields.matches(place, stored)
    }
}
