//! The custom resource definitions that a cluster is given come from the same types.

use insta::assert_yaml_snapshot;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use trellis_api::kinds::{Attachment, Pool, Replica, Target, Volume};

fn all() -> [CustomResourceDefinition; 5] {
    [
        Pool::crd(),
        Volume::crd(),
        Target::crd(),
        Replica::crd(),
        Attachment::crd(),
    ]
}

// Fails if a kind changes in a way that users of a cluster would notice, without anybody looking at it.
#[test]
fn the_definitions_are_as_they_were() {
    for definition in all() {
        assert_yaml_snapshot!(definition.spec.names.plural.clone(), definition);
    }
}

// Fails if a cluster would refuse a definition: every schema is structural, with a type at every level.
#[test]
fn every_schema_is_structural() {
    for definition in all() {
        let name = &definition.spec.names.kind;
        for version in &definition.spec.versions {
            let schema = version
                .schema
                .as_ref()
                .and_then(|schema| schema.open_api_v3_schema.as_ref());
            let schema = serde_json::to_value(schema).expect("a schema is JSON");
            assert_structural(&schema, name);
        }
    }
}

fn assert_structural(schema: &serde_json::Value, at: &str) {
    let typed = schema["type"].is_string() || schema["x-kubernetes-int-or-string"] == true;
    assert!(typed, "{at} has no type: {schema}");
    assert!(schema["$ref"].is_null(), "{at} refers elsewhere");
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        assert_structural(property, &format!("{at}.{name}"));
    }
    if schema["items"].is_object() {
        assert_structural(&schema["items"], &format!("{at}[]"));
    }
}
