//! Our own kinds, from the types that the CustomResourceDefinitions are made of.

use kube::Resource;
use kube::core::object::HasSpec;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use trellis_api::kinds::{Attachment, Pool, Replica, Target, Volume};

use super::columns;
use crate::kind::{Column, Kind, Naming, Origin};

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
    }
}

pub(super) fn pool() -> Kind {
    let names = Names {
        kind: "Pool",
        plural: "pools",
        singular: "pool",
        short: &[],
    };
    custom::<Pool>(names, columns::POOL)
}

pub(super) fn volume() -> Kind {
    let names = Names {
        kind: "Volume",
        plural: "volumes",
        singular: "volume",
        short: &["tv"],
    };
    custom::<Volume>(names, columns::VOLUME)
}

pub(super) fn target() -> Kind {
    let names = Names {
        kind: "Target",
        plural: "targets",
        singular: "target",
        short: &[],
    };
    custom::<Target>(names, columns::TARGET)
}

pub(super) fn replica() -> Kind {
    let names = Names {
        kind: "Replica",
        plural: "replicas",
        singular: "replica",
        short: &[],
    };
    custom::<Replica>(names, columns::REPLICA)
}

pub(super) fn attachment() -> Kind {
    let names = Names {
        kind: "Attachment",
        plural: "attachments",
        singular: "attachment",
        short: &[],
    };
    Kind {
        namespaced: true,
        ..custom::<Attachment>(names, columns::ATTACHMENT)
    }
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
        }
    }
}
