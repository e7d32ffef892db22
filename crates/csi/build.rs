//! Compiles the declarations of the wire. No `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["proto/csi.proto", "proto/registration.proto"];
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    let declared = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().compile_fds(declared)?;
    Ok(())
}
