//! Our own kinds, from the types that also define the CustomResourceDefinitions.

use kube::Resource;
use kube::core::object::HasSpec;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use trellis_api::kinds::{Attachment, Pool, Replica, Target, Volume};

use super::{at, columns, text};
use crate::kind::{Change, Column, FieldError, Kind, Naming, Origin};

/// The least and the most that a pool may promise, in percent of what it holds.
const OVERCOMMIT_PERCENT_MIN: u64 = 1;
const OVERCOMMIT_PERCENT_MAX: u64 = 10_000;

/// The names of a kind of ours.
struct Names {
    kind: &'static str,
    plural: &'static str,
    singular: &'static str,
    short: &'static [&'static str],
}

fn custom<T>(names: Names, columns: &'static [Column]) -> Kind
where
    T: Resource + HasSpec + Serialize + DeserializeOwned + JsonSchema,
{
    let Names {
        kind,
        plural,
        singular,
        short,
    } = names;
    Kind {
        group: trellis_api::kinds::GROUP,
        version: "v1alpha1",
        kind,
        plural,
        singular,
        short_names: short,
        categories: &["trellis"],
        namespaced: false,
        status: true,
        approval: false,
        keep: |_, _, _| {},
        sign: |_, _| {},
        normalise: super::typed::<T>,
        schema: T::json_schema,
        default: |_| {},
        validate: |_| Vec::new(),
        selectable_fields: &[],
        columns,
        keyed_lists: &[("status.conditions", &["type"])],
        atomic_maps: &[],
        admit: |_, _| {},
        forbid: |_| None,
        origin: Origin::Custom,
        naming: Naming::Subdomain,
        answer: None,
    }
}

pub(super) fn pool() -> Kind {
    let names = Names {
        kind: "Pool",
        plural: "pools",
        singular: "pool",
        short: &[],
    };
    Kind {
        selectable_fields: &["spec.node"],
        validate: |change| {
            let mut errors = frozen(change, |field| matches!(field, "node" | "path"));
            errors.extend(relative_path(change, "path"));
            errors.extend(wild_promise(change));
            errors
        },
        ..custom::<Pool>(names, columns::POOL)
    }
}

pub(super) fn volume() -> Kind {
    let names = Names {
        kind: "Volume",
        plural: "volumes",
        singular: "volume",
        short: &["tv"],
    };
    Kind {
        validate: |change| {
            let mut errors = frozen(change, |field| {
                matches!(field, "class" | "via" | "filesystem")
            });
            errors.extend(other_identity(change, "volumeId"));
            errors
        },
        ..custom::<Volume>(names, columns::VOLUME)
    }
}

pub(super) fn target() -> Kind {
    let names = Names {
        kind: "Target",
        plural: "targets",
        singular: "target",
        short: &[],
    };
    Kind {
        selectable_fields: &["spec.node"],
        validate: |change| {
            let mut errors = frozen(change, |field| matches!(field, "volume"));
            errors.extend(earlier_term(change));
            errors
        },
        ..custom::<Target>(names, columns::TARGET)
    }
}

/// A target that could go back to an earlier term would be refused by its copies for ever.
fn earlier_term(change: Change<'_>) -> Option<FieldError> {
    let term = |object| at(object, "/spec/term").and_then(Value::as_u64);
    let (old, new) = (
        term(change.old?).unwrap_or(0),
        term(change.new).unwrap_or(0),
    );
    let value = Value::from(new);
    (new < old).then(|| FieldError::invalid("spec.term", &value, "may only rise"))
}

pub(super) fn replica() -> Kind {
    let names = Names {
        kind: "Replica",
        plural: "replicas",
        singular: "replica",
        short: &[],
    };
    Kind {
        selectable_fields: &["spec.node"],
        validate: |change| {
            let mut errors = frozen(change, |field| {
                !matches!(field, "capacity" | "discard" | "replicaId")
            });
            errors.extend(other_identity(change, "replicaId"));
            errors
        },
        ..custom::<Replica>(names, columns::REPLICA)
    }
}

pub(super) fn attachment() -> Kind {
    let names = Names {
        kind: "Attachment",
        plural: "attachments",
        singular: "attachment",
        short: &[],
    };
    Kind {
        selectable_fields: &["spec.node"],
        namespaced: true,
        validate: |change| {
            let mut errors = frozen(change, |field| field != "volume");
            errors.extend(other_volume(change));
            let places = ["consumer.mount.path", "consumer.device.path"];
            errors.extend(
                places
                    .into_iter()
                    .filter_map(|field| relative_path(change, field)),
            );
            errors
        },
        ..custom::<Attachment>(names, columns::ATTACHMENT)
    }
}

/// Refuses a change of spec fields that something on a disk or a node was made from.
fn frozen(change: Change<'_>, is_frozen: fn(&str) -> bool) -> Vec<FieldError> {
    let Some(old) = change.old else {
        return Vec::new();
    };
    let fields = |object| -> Vec<&String> {
        let spec = at(object, "/spec").and_then(Value::as_object);
        spec.into_iter().flat_map(|spec| spec.keys()).collect()
    };
    let mut names = fields(old);
    names.extend(fields(change.new));
    names.sort_unstable();
    names.dedup();
    let mut errors = Vec::new();
    for name in names.into_iter().filter(|name| is_frozen(name)) {
        let pointer = format!("/spec/{name}");
        let value = at(change.new, &pointer);
        if at(old, &pointer) != value {
            errors.push(FieldError::invalid(
                &format!("spec.{name}"),
                value.unwrap_or(&Value::Null),
                "field is immutable",
            ));
        }
    }
    errors
}

/// Refuses another identity than the one that the bytes were made with. The identity may be written later, and then it
/// must be the uid of the object.
fn other_identity(change: Change<'_>, field: &str) -> Option<FieldError> {
    let pointer = format!("/spec/{field}");
    let (old, new) = (text(change.old?, &pointer), text(change.new, &pointer));
    let is_uid = old.is_empty() && new == text(change.new, "/metadata/uid");
    (old != new && !is_uid).then(|| {
        let field = format!("spec.{field}");
        FieldError::invalid(&field, &Value::from(new), "field is immutable")
    })
}

/// Refuses an attachment of nothing, and one that would become that of another volume. One that names only a claim may
/// get its volume later.
fn other_volume(change: Change<'_>) -> Option<FieldError> {
    const FIELD: &str = "spec.volume";
    const VOLUME: &str = "/spec/volume";
    let new = text(change.new, VOLUME);
    if new.is_empty() && text(change.new, "/spec/claimName").is_empty() {
        let why = "claimName or volume must be given";
        return Some(FieldError::required(FIELD, why));
    }
    let old = change.old.map_or("", |old| text(old, VOLUME));
    (!old.is_empty() && old != new)
        .then(|| FieldError::invalid(FIELD, &Value::from(new), "field is immutable"))
}

/// Refuses a path that means something else in every directory.
fn relative_path(change: Change<'_>, field: &str) -> Option<FieldError> {
    let pointer = format!("/spec/{}", field.replace('.', "/"));
    let path = at(change.new, &pointer)?.as_str()?;
    (is_new(change, &pointer) && !path.starts_with('/')).then(|| {
        let field = format!("spec.{field}");
        FieldError::invalid(&field, &Value::from(path), "must be an absolute path")
    })
}

/// Refuses a pool that could promise nothing, or without measure.
fn wild_promise(change: Change<'_>) -> Option<FieldError> {
    const FIELD: &str = "spec.overcommitPercent";
    const PERCENT: &str = "/spec/overcommitPercent";
    let value = at(change.new, PERCENT).filter(|_| is_new(change, PERCENT))?;
    let percent = value.as_u64()?;
    let bound = if percent < OVERCOMMIT_PERCENT_MIN {
        format!("greater than or equal to {OVERCOMMIT_PERCENT_MIN}")
    } else if percent > OVERCOMMIT_PERCENT_MAX {
        format!("less than or equal to {OVERCOMMIT_PERCENT_MAX}")
    } else {
        return None;
    };
    let why = format!("{FIELD} in body should be {bound}");
    Some(FieldError::invalid(FIELD, value, &why))
}

/// Whether a write brings a value. A stored value may stay, so that its object can still be deleted.
fn is_new(change: Change<'_>, pointer: &str) -> bool {
    change
        .old
        .is_none_or(|old| at(old, pointer) != at(change.new, pointer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::CustomResourceExt;

    #[test]
    fn the_rows_say_what_the_definitions_say() {
        // Fails if a row and the CustomResourceDefinition of its type name or scope a kind differently.
        for (row, definition) in [
            (pool(), Pool::crd()),
            (volume(), Volume::crd()),
            (target(), Target::crd()),
            (replica(), Replica::crd()),
            (attachment(), Attachment::crd()),
        ] {
            let spec = definition.spec;
            assert_eq!(row.kind, spec.names.kind);
            assert_eq!(row.plural, spec.names.plural);
            assert_eq!(Some(row.singular), spec.names.singular.as_deref());
            assert_eq!(row.short_names, spec.names.short_names.unwrap_or_default());
            assert_eq!(row.group, spec.group);
            assert_eq!(row.version, spec.versions[0].name);
            assert_eq!(row.namespaced, spec.scope == "Namespaced");
            let selectable = spec.versions[0].selectable_fields.iter().flatten();
            let selectable = selectable.map(|field| field.json_path.trim_start_matches('.'));
            assert_eq!(row.selectable_fields, selectable.collect::<Vec<_>>());
        }
    }
}
